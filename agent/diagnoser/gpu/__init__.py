"""Tests of GPUs: what NVIDIA's own diagnostics say, and copies to and from them."""
