"""Which diagnostic tests are run on stopped machines, and what their results say of each; pure functions."""
