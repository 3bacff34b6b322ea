"""Readers of other tools' files about a job: stacks of py-spy, flight records of torch, reports of NCCL, timings."""
