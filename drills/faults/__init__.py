"""The faults that drills inject, one file for each fault or family of faults; ``all.py`` lists them."""
