"""The incident: stop, decide, restore, reattempt, confirm; or parked for an operator."""
