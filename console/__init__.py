"""The command ``everstep``: its subcommands and their output."""
