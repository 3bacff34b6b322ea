"""The agent's reports about ranks: observations, metrics, step records and captured output."""
