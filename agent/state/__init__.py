"""What the agent remembers: in shared memory at once, in its state folder as soon as the disk takes it."""
