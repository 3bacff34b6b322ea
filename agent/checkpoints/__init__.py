"""This package detects, writes, sends and deletes the copies of training state on this machine."""
