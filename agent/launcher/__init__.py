"""This package starts ranks: it forks them from a process that has imported torch."""
