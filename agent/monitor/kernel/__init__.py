"""What the kernel log says of the machine: lines, their meanings, and the codes of GPU drivers."""
