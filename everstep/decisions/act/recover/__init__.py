"""Decisions about a stopped job: whether and how it is restarted, and whether the restart succeeded."""
