"""This package inspects the kernel log, with rules for its lines."""
