"""Checkpoints on disk and on remote storage: one safetensors file a rank, with a manifest."""
