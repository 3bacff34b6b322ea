"""Decisions about a failure: machines that leave, the next rung, the restart, and the version of the code."""
