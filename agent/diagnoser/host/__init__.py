"""This package tests the host: its memory, its disk, and the bits that it computes."""
