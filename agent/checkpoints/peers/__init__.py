"""The exchange of training state between agents, over a TCP data port beside gRPC.

The rpc ``OpenExchange`` returns the port and the key of the job; gRPC protects it with TLS and a token. The key is
never sent over the data port; see :mod:`agent.checkpoints.peers.wire`.
"""
