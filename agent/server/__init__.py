"""The agent's gRPC services: commands carried out once, and answers."""
