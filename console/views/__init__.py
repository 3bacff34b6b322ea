"""What commands show: jobs as they run, their state, incidents, drills."""
