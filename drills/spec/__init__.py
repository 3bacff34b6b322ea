"""What a drill is asked to do: faults, options, the job, and what may be lost by it."""
