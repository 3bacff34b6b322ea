"""The node agent starts, watches and stops the ranks of one machine."""
