"""Where copies of training state go, which steps they are of, and from which of them a job goes on."""
