"""This package samples the processes, stacks and flight records of this machine's ranks, and stops no rank for long."""
