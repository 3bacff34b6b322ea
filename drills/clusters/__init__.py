"""Clusters of a drill's own, on this machine or on machines with a network of their own."""
