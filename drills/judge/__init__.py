"""Gathers the facts after a drill, and checks them part by part; ``drills/verdict.py`` makes the result."""
