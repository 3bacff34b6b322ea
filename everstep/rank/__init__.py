"""What an agent and its ranks share: environment variables, step reports, and the faults that a drill injects."""
