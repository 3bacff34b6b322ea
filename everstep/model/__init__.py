"""The vocabulary: jobs, machines, ranks, incidents and the numbers that govern them. All other folders speak it."""
