"""Activities that the pool starts, and activities that ask the pool."""
