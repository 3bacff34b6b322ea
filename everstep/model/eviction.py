"""What the rules of eviction answer: which machines are taken out of a job, and why, "no" included.

These models are stored in histories and in the ledger: fields are only added, with
defaults.
"""

from __future__ import annotations

from everstep.model.message import Model
from everstep.model.words import Words


class EvictMode(Words):
    """What follows where a rule says that a machine is to be evicted."""

    ACT = "act"
    """It is evicted."""
    APPROVE = "approve"
    """An operator is asked."""
    SHADOW = "shadow"
    """It is written down, and nothing is done."""
    OFF = "off"
    """The rule is not asked."""


class EvictAnswer(Model):
    """What one rule said of one machine."""

    rule: str
    """Its name, which does not change (``everstep.decisions.evict.rules``)."""
    machine: str
    """Empty: the answer is of all that are to be evicted together."""
    yes: bool
    """It is to be evicted, as far as this rule goes."""
    why: str
    mode: EvictMode = EvictMode.ACT
    """What follows from a yes, by the policy of the job."""
    reason: str = ""
    """Reason code of what it rests on, e.g. of a finding."""


class Eviction(Model):
    """A machine that is to be taken out of the job."""

    machine: str
    rule: str
    """The first rule that says so."""
    reason: str
    """Reason code of what it rests on, e.g. of a finding."""
    why: str
