"""Copies between a training state's tensors and a slot, beside training, on the host and with CUDA."""
