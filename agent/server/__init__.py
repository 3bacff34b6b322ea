"""This package has the agent's gRPC services: commands, each of which is carried out once, and queries."""
