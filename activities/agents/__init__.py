"""Activities that talk to node agents, and how many of them are called at once."""
