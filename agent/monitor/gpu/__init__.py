"""This package inspects GPUs, with NVML in a process of its own, and with DCGM."""
