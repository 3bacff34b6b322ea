"""The local cluster: Temporal, workers and one agent per machine as processes of this computer."""
