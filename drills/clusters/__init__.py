"""Clusters for drills: all machines share the network of this computer, or each has a network of its own."""
