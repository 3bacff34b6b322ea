"""The injection of faults: by ranks and workers themselves, and from outside."""
