"""Tests of the machine itself: its memory, its disk, and what it computes."""
