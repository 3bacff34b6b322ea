"""The copies of training state on this machine: what saves, holds and may write them, and what is deleted."""
