"""This package tests data transfers within the machine and between two machines."""
