"""Decisions about the cause of a fault: pure functions judge logs, hangs, slow steps, machine tests and replays."""
