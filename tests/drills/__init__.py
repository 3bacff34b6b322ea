"""Drills as tests. They are a package, so that its files share clusters by fixtures of the package's scope."""
