"""Tests of GPUs: NVIDIA's own diagnostics, and copies to GPUs and back."""
