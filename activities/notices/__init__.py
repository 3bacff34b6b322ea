"""Tells people of events: who is told (a file), what there is to tell, and its delivery by a program or over HTTPS."""
