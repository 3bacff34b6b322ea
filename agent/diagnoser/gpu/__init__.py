"""This package tests GPUs with NVIDIA's own diagnostics, and with copies to the GPUs and back."""
