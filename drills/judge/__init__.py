"""From what was seen to a verdict."""
