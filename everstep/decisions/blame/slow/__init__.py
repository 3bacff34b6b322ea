"""Which machine slows a job down, and what slows it down that is no machine's doing; pure functions."""
