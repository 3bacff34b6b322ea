"""Decisions about the machine pool: the number of standbys, and the machine that replaces an evicted machine."""
