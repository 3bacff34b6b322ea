"""Snapshots of jobs' code on this machine."""
