"""What other tools wrote of a job, read into what is judged: stacks, flight records, NCCL's reports, timings."""
