"""What the agent tells of ranks: observations, step records, captured output."""
