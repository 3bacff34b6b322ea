"""What is done about a failure: whether and how the job is tried again, and whether it steps then."""
