"""Diagnostic tests of a machine whose ranks are stopped; each runs in a process of its own, with a deadline."""
