"""Observations of a drill from outside: processes, copies, step records."""
