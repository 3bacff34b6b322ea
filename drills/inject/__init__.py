"""Doing it: faults that ranks and workers act out, and what is done to them from outside."""
