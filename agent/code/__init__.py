"""The snapshots of jobs' code on this machine."""
