"""The request of a drill: faults, options, the job, and the steps that it may lose."""
