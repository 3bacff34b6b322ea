"""The incident: stop, decide, restore, reattempt and confirm; or park for an operator."""
