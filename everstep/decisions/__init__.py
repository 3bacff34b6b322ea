"""Decisions are pure functions that take facts and return an answer.

They read no clock and do no I/O: the time is an argument. Every answer has a reason, even if the answer is "no".
Workflows and watchers call the decisions. Tests call them directly.
"""
