"""Checks and choices before a job starts: its machines, its code, its storage, and the step from which it starts."""
