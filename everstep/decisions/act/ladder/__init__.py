"""The ladder decides, while the job is stopped, what is tried next against a fault whose cause is not known."""
