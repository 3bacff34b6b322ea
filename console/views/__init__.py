"""The output that several commands share, or that has a module of its own: jobs, incidents, reports, drills."""
