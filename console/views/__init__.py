"""Following a job: what its ranks do, what its workflow says, and how a terminal, a pipe or a script is told."""
