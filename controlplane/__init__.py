"""The control plane put together: the worker, the client that commands use, and the local cluster."""
