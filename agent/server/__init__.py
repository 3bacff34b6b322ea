"""The agent's gRPC services: commands that are carried out once, and queries."""
