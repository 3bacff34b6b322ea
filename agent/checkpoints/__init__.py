"""The copies of training state on this machine: who saves, who holds, who may write, what is thrown away."""
