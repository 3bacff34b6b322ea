"""The verdict on a drill, from the facts."""
