"""Agents exchange copies of training state over a TCP data port beside gRPC.

gRPC's ``OpenExchange``, with its TLS and token, tells where the port is and the
key of the job. The key never goes over the wire; see :mod:`agent.checkpoints.peers.wire`.
"""
