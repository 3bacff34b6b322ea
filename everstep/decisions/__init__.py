"""Decisions: pure functions from facts to an answer.

They use no clock, no input and no output: time is an argument, and every answer has its reason, "no" included.
Workflows and watchers call them, and tests need nothing else.
"""
