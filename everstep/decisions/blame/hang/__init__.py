"""The machine that a job hangs on: pure functions judge stacks and collectives of all ranks together."""
