"""Diagnostic tests of stopped machines: pure functions that choose the tests, and judge each machine by the results."""
