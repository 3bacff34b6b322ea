"""The tiers below memory: checkpoints on disk and on remote storage, written and read by the agent."""
