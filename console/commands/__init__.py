"""The commands of ``everstep``, one module for each part.

Temporal, gRPC, SQLAlchemy and the drills are imported inside the functions that need them, so ``--help`` and wrong
usage do not wait for these imports.
"""
