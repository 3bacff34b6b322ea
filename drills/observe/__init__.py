"""Observes a drill from outside: the processes, the stored copies and the step records of its job."""
