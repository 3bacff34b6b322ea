"""What a reading says of each GPU: pure functions from a reading, and what is known of before, to what is found."""
