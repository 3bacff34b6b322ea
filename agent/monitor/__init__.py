"""What an agent sees of its machine: inspections, each with its own period, and their verdicts."""
