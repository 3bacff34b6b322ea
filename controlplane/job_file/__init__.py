"""Job files: from TOML to a checked job."""
