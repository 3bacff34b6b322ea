"""What the ranks of this machine do now: processes, stacks and flight records. Nothing of it stops a rank for long."""
