"""The inspection of the kernel log, and the rules for its lines."""
