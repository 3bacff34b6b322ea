"""Injects faults: ranks and workers perform some faults themselves, and the injector does others from outside."""
