"""Decisions about the pool of standbys: how many there should be, and which machine takes the place of which."""
