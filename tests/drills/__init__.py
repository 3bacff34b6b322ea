"""Drills as tests. This folder is a package, so that its files share clusters through fixtures with package scope."""
