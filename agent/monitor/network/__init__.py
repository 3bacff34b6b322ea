"""This package inspects the network: links of interfaces, InfiniBand ports, and lost packets."""
