"""This package exchanges training state between agents, over a TCP data port beside gRPC.

The rpc ``OpenExchange`` returns the port and the key of the job; TLS and a token protect this rpc. The key is never
sent over the data port; see :mod:`agent.checkpoints.peers.wire`.
"""
