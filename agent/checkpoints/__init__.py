"""The copies of training state on this machine: how they are noticed, written, sent and deleted."""
