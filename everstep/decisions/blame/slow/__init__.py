"""The cause of slow steps: a machine that slows a job down, or a cause outside the machines; pure functions."""
