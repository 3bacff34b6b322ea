"""What commands ask of workflows, agents and the ledger, as data."""
