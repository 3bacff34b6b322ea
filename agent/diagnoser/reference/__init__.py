"""A small model of a job's structure, and one step of it with fixed weights and input: its bits are compared."""
