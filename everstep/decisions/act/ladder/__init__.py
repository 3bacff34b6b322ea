"""The ladder: the choice of what is tried next about a fault whose cause is not known, while the job is stopped."""
