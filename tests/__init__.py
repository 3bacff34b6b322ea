"""The tests; a package, so that ``tests.drills`` is not taken for ``drills``."""
