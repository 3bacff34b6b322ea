"""The detection of anomalies from the state of ranks and machines, e.g. of hangs, slow steps and failed ranks."""
