"""What is concluded from what ranks and machines show: ends, hangs, drift, checkpoints that go stale."""
