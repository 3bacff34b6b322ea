"""What the pool of machines asks, and what is asked of it."""
