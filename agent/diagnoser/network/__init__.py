"""Tests of data transfers within the machine and between two machines."""
