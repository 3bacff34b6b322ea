"""Diagnostic tests of a machine whose ranks are stopped: each in a process of its own, bounded in time."""
