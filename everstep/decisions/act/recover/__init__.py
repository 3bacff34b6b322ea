"""Decisions about a stopped job: whether it is restarted, from which step, and whether the restart succeeded."""
