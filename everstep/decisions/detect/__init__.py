"""The detection of anomalies from the state of ranks and machines: ends, hangs, slow steps, stale checkpoints."""
