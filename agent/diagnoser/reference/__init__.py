"""The reference model: one step of a small model with the job's structure, whose bits machines compare."""
