"""What every worker process watches beside Temporal: agents' observations, and what jobs left behind."""
