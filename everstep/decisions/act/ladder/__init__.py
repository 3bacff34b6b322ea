"""The ladder of stop-time checks: pure functions that choose the next rung for a fault whose cause is not known."""
