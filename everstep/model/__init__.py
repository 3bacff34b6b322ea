"""Models that all other packages use: jobs, machines, ranks, incidents, and the settings of their recovery."""
