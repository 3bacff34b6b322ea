"""Whose matter a fault is."""

from __future__ import annotations

from everstep.model.words import Words


class Owner(Words):
    """Where a fault comes from, and so who has to do something about it."""

    MACHINE = "machine"
    NETWORK = "network"
    """What lies between machines; a link that goes down and comes back may be a switch's."""
    CODE = "code"
    """The job's own program, or its settings."""
    DATA = "data"
    """What the job reads."""
    STORAGE = "storage"
    """File systems and object storage that machines share."""
    SCHEDULER = "scheduler"
    """Who gave the machines took them away, or ended what ran on them."""
    UNKNOWN = "unknown"
