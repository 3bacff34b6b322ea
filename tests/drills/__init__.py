"""Drills as tests. This folder is a package, so its files can share clusters through fixtures with package scope."""
