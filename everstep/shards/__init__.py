"""Checkpoints on disk and on remote storage: for each rank a safetensors file and a manifest."""
