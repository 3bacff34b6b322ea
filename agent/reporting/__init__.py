"""This package makes the agent's reports about ranks: observations, metrics, step records and captured output."""
