"""Evidence that other tools wrote, read into what is judged: stacks, flight records, NCCL's reports, timings."""
