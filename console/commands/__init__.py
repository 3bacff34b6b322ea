"""The commands of ``everstep``, one module for each part.

Temporal, gRPC, SQLAlchemy and the drills are imported inside the functions that need them. So ``--help`` and wrong usage
do not wait for these imports.
"""
