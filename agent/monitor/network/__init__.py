"""Inspections of the network: links of this machine, InfiniBand ports, lost packets."""
