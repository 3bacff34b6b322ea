"""The training library that a script imports. Importing any of its modules imports torch."""
