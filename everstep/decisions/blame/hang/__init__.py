"""The judgement of a hang: which ranks the others wait for, from the stacks and collectives of all ranks."""
