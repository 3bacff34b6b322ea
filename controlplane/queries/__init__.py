"""Queries of commands to workflows, agents and the ledger; the answers are data."""
