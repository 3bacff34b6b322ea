"""The agent's reports about ranks: observations, step records, captured output."""
