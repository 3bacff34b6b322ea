"""This package has the tiers below memory: the agent writes and reads checkpoints on disk and on remote storage."""
