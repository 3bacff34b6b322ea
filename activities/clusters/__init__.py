"""Where machines come from, and who else has to be told of them."""
