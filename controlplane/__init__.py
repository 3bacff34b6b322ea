"""The parts of the control plane: the worker, the client that commands use, and the local cluster."""
