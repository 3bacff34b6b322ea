"""This package keeps the snapshots of jobs' code on this machine."""
