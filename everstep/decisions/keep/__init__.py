"""Decisions about copies of training state: their locations, the steps to copy, and the copies to resume from."""
