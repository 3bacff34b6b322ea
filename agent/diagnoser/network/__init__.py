"""Tests of what moves bytes: within the machine, and between two machines."""
