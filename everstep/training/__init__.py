"""The training library: what a script imports. Importing one of its modules imports torch."""
