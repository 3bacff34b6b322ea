"""What is concluded from what ranks and machines show: ends, stalls, drift, checkpoints that go stale."""
