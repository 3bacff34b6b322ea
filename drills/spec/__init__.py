"""The request of a drill as data: the fault with its options, the job, and the steps that the job may lose."""
