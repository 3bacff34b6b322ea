"""Drills as tests. A package, so that its files can share a cluster: a fixture of its scope ends with its last file."""
