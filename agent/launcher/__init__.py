"""How ranks are started: they are forked from a process that has imported torch."""
