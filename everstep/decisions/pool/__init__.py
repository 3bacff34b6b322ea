"""Decisions about the machine pool: which job has each machine, replacements, and the number of standbys."""
