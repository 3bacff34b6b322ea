"""The commands of ``everstep``, one module for each part.

Functions import Temporal, gRPC, SQLAlchemy and drills themselves: so ``--help`` and wrong usage do not wait for them.
"""
