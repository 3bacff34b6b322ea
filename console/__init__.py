"""Where everything is put together: the command line, the worker, the local cluster, reports."""
