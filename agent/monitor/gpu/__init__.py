"""The inspections of GPUs: by NVML, in a process of its own, and by DCGM."""
