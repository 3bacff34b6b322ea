"""The output of commands: jobs as they run, their state, incidents, drills."""
