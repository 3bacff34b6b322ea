"""Workflows: deterministic and thin. They run the steps in order; ``everstep.decisions`` decides what to do."""
