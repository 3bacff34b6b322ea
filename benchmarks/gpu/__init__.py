"""Measures everstep on one GPU, with one command for at most nine minutes: ``python -P -m benchmarks.gpu``."""
