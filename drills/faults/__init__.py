"""The faults that drills inject, a file for each or for a family that shares its code; ``all.py`` lists them."""
