"""What is done about a failure: machines that leave, the rung that is tried next, the restart, the code that runs."""
