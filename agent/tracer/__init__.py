"""Samples of the ranks of this machine: processes, stacks and flight records. A sample stops no rank for long."""
