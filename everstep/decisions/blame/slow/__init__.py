"""The cause of slow steps: a machine that slows a job down, or something else."""
