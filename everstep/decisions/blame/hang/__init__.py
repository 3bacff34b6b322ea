"""Which machine a job hangs on: stacks and collectives of all ranks, judged together; pure functions."""
