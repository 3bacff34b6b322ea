"""Which version of a job's code runs, and which one is taken back: pure."""
