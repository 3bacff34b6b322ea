"""The training state: what belongs to it, how it becomes bytes, and how objects get it back."""
