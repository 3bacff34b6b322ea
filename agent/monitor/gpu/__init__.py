"""The GPUs of the machine: read by NVML in a process of their own, judged here, and what DCGM says of them."""
