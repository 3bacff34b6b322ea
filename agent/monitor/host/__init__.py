"""Inspections of the host itself: memory, processors, disks, mounts, clock, ranks and the agent."""
