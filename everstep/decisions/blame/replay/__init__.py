"""Which machines run a job's script in which groups to find one that computes wrongly; pure functions."""
