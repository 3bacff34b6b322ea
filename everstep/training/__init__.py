"""The training library: what a script imports. Torch is imported when first used."""
