"""Clusters for drills: on this machine, or on machines with their own network."""
