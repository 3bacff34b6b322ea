"""Decides whether so many machines have a fault that its cause is outside of them."""

from __future__ import annotations

SHARED_MACHINES = 2
SHARED_SHARE = 0.5
"""A fault is shared if more than ``SHARED_MACHINES`` machines of the job, and also more than this share of its
machines, have the fault. In a job of two machines, a fault is shared if both machines have it."""


def is_shared(count: int, machines: int) -> bool:
    """Return whether a fault of ``count`` of a job's machines has its cause outside of them."""
    least = min(SHARED_MACHINES, machines - 1)
    return count > max(least, 1) and count > SHARED_SHARE * machines
