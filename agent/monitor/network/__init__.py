"""Inspections of the network: links of interfaces, InfiniBand ports, lost packets."""
