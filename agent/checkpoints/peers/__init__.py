"""Agents exchange copies of training state over a TCP data port beside gRPC.

gRPC's ``OpenExchange``, with its TLS and token, returns the address of the port and the
key of the job. The key never goes over the data port; see :mod:`agent.checkpoints.peers.wire`.
"""
