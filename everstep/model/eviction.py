"""What the rules of eviction answer: which machines are taken out of a job, and why, "no" included.

These models are stored in histories and in the ledger: fields are only added, with
defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from everstep.base.text import listed
from everstep.model.message import Model, Words

ANSWERS_KEPT = 200
"""Answers of one incident."""
BREAKER = "breaker"
"""Stands for a rule in the answer of the breaker."""


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
    """Its name, which does not change (``everstep.decisions.act.evict.rules``)."""
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
    approved_by: str = ""
    """The operator who had to approve it, and did; empty: nobody had to."""


def named(evictions: Sequence[Eviction]) -> str:
    """For people: ``m1 (gpu-lost)``, and who approved it."""
    groups: dict[str, list[str]] = {}
    for one in evictions:
        groups.setdefault(one.approved_by, []).append(f"{one.machine} ({one.reason})")
    texts = [listed(names, 4) + (f", approved by {who}" if who else "") for who, names in groups.items()]
    return ", ".join(texts)


class EvictionState(BaseModel):
    """What an incident knows of evictions, from stop to stop; its workflow changes it in place."""

    model_config = ConfigDict(extra="allow")

    done: list[Eviction] = Field(default_factory=list)
    """Machines that left the job in this incident."""
    asked: list[EvictAnswer] = Field(default_factory=list)
    """What the rules said, the newest time that they were asked last; bounded."""
    done_ns: list[int] = Field(default_factory=list)
    """When they left without an operator, one entry for each."""
    waiting: list[Eviction] = Field(default_factory=list)
    """Machines that leave the job once an operator approves it; the job is parked meanwhile."""
    approved_by: str = ""
    """The operator who has just let the machines go that wait for it; empty: nobody did."""
    approved: dict[str, str] = Field(default_factory=dict)
    """Machine that may go → the operator who approved; good until there is another in its place."""
    declined: list[str] = Field(default_factory=list)
    """Machines with which an operator lets the job go on, whatever is said of them."""
    unfit: list[Eviction] = Field(default_factory=list)
    """Machines that came into the job and could not be made ready: they leave it once there are others."""
    requests: int = 0
    """How often the pool was asked for machines: each request has a number of its own."""
    gone: dict[str, list[int]] = Field(default_factory=dict)
    """Silent machine that left since the newest launch → the ranks that it ran."""
    joined: list[str] = Field(default_factory=list)
    """Machines that came into the job since then."""

    def take(self, answers: list[EvictAnswer]) -> None:
        """Note what the rules said; the same answer is kept once."""
        known = {(answer.rule, answer.machine, answer.reason): answer for answer in self.asked}
        known |= {(answer.rule, answer.machine, answer.reason): answer for answer in answers}
        self.asked = list(known.values())[-ANSWERS_KEPT:]

    @property
    def tripped(self) -> str:
        """Why the breaker had an operator asked, the last time that it did; empty: it never did."""
        return next((answer.why for answer in reversed(self.asked) if answer.rule == BREAKER), "")

    @property
    def wanted(self) -> list[str]:
        """Machines that some rule wants to leave, and that have not."""
        left = {one.machine for one in self.done}
        return sorted({answer.machine for answer in self.asked if answer.yes} - left)

    def approve(self, who: str) -> None:
        """An operator lets those go that wait for it, and nobody else."""
        self.approved |= {one.machine: who for one in self.waiting}

    def decline(self) -> None:
        """An operator lets the job go on with the machines that were to leave it."""
        self.declined = sorted({*self.declined, *self.wanted})
