"""The activities are all that the workflows do to the outside world, in one folder per outside system."""
