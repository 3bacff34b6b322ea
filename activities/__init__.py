"""Activities: what the workflows do to the outside world, one file per outside system."""
