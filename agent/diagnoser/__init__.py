"""This package tests a machine whose ranks are stopped. Each test runs in a process of its own, with a deadline."""
