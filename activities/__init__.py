"""Activities: what the workflows do to the outside world, one folder per outside system."""
