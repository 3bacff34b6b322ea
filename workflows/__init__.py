"""The workflows are deterministic and thin: they run the steps in order; ``everstep.decisions`` decides what to do."""
