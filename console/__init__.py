"""The command ``everstep``: its commands, and what they show."""
