"""This package inspects the host: memory, processors, disks, mounts, clock, ranks, versions, and the agent."""
