"""Checks of the machines before a job starts on them."""
