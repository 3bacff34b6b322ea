"""How ranks come to life: a process with torch imported, from which they are forked."""
