"""The tests are a package, so that ``tests.drills`` is not confused with ``drills``."""
