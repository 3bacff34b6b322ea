"""The decisions: pure functions over what was seen.

No clock, no input or output: time is an argument, and every answer carries its
reason, "no" included. Workflows and watchers call them; tests need nothing else.
"""
