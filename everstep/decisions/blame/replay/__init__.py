"""Pure functions for the replay of a job on groups of machines, which finds a machine that computes wrongly."""
