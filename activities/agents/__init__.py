"""These activities call the node agents."""
