"""The commands of ``everstep``, one module for each part."""
