"""Clusters: the sources of machines."""
