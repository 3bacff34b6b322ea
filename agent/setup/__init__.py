"""This package checks what an agent needs of its machine or container."""
