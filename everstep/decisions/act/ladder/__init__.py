"""The ladder of stop-time checks: what is tried next about a fault that nobody has named; pure functions."""
