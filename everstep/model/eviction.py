"""Defines the answers of the rules of eviction: which machines leave a job, which stay, and why.

These models are stored in histories and in the ledger, so fields are only added, with defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from everstep.base.text import listed
from everstep.model.message import Model, Words

STANDBY_UNFIT = "standby-unfit"
"""The rule and reason code of a standby that could not be made ready for the job. It does not count for the breaker: it
never ran a rank of the job."""
ANSWERS_KEPT = 200
"""The most answers that one incident keeps."""
BREAKER = "breaker"
"""The value of ``EvictAnswer.rule`` in an answer of the breaker."""


class EvictMode(Words):
    """What happens when a rule asks for the eviction of a machine."""

    ACT = "act"
    """The machine is evicted."""
    APPROVE = "approve"
    """The machine is evicted once an operator approves."""
    SHADOW = "shadow"
    """The answer is only recorded."""
    OFF = "off"
    """The rule is not evaluated."""


class EvictAnswer(Model):
    """The answer of one rule about one machine."""

    rule: str
    """The rule's name, which does not change (``everstep.decisions.act.evict.rules``)."""
    machine: str
    """The machine; empty: the answer is about all machines that the rules want to evict, taken together."""
    yes: bool
    """The rule asks for the eviction of the machine."""
    why: str
    mode: EvictMode = EvictMode.ACT
    """What the policy of the job does after a yes."""
    reason: str = ""
    """Reason code of the evidence, e.g. the code of a finding."""


class Eviction(Model):
    """The eviction of one machine from its job."""

    machine: str
    rule: str
    """The first rule that asks for the eviction."""
    reason: str
    """Reason code of the evidence, e.g. the code of a finding."""
    why: str
    approved_by: str = ""
    """The operator who approved the eviction; empty: no approval was needed."""


def named(evictions: Sequence[Eviction]) -> str:
    """The evicted machines in one line, e.g. ``m1 (gpu-lost)``, with the operators who approved the evictions."""
    groups: dict[str, list[str]] = {}
    for eviction in evictions:
        groups.setdefault(eviction.approved_by, []).append(f"{eviction.machine} ({eviction.reason})")
    texts = [listed(names, 4) + (f", approved by {operator}" if operator else "") for operator, names in groups.items()]
    return ", ".join(texts)


class EvictionState(BaseModel):
    """The evictions of an incident over all of its stops. The incident's workflow changes this object in place."""

    model_config = ConfigDict(extra="allow")

    done: list[Eviction] = Field(default_factory=list)
    """Machines that left the job in this incident."""
    asked: list[EvictAnswer] = Field(default_factory=list)
    """The newest answers of the rules, at most ``ANSWERS_KEPT``."""
    done_ns: list[int] = Field(default_factory=list)
    """Times of evictions that count for the breaker, nanoseconds of the wall clock."""
    waiting: list[Eviction] = Field(default_factory=list)
    """Machines that leave the job once an operator approves the evictions; the job is parked until then."""
    approved: dict[str, str] = Field(default_factory=dict)
    """Machine → the operator who approved its eviction; valid until the machine is replaced."""
    declined: list[str] = Field(default_factory=list)
    """Machines that stay in the job because an operator decided so."""
    unfit: list[Eviction] = Field(default_factory=list)
    """Machines that joined the job and could not be prepared: they leave once there are replacements."""
    requests: int = 0
    """Number of requests to the pool so far. The id of the next request contains the next number."""
    missing: int = 0
    """Number of machines that the pool lacks to replace all machines that are to leave."""
    hang_stays: bool = False
    """There was no replacement for the machines that a hang names, so the job is tried again with them."""
    silent_since: dict[str, float] = Field(default_factory=dict)
    """Machine that does not answer → since when, by the clock of the incident's workflow."""
    dying_since: dict[str, float] = Field(default_factory=dict)
    """Machine with killed ranks that are not gone → when they were killed, seconds of the workflow's clock."""

    def record(self, answers: list[EvictAnswer]) -> None:
        """Keep the answers of the rules; equal answers are kept once."""
        new = {(answer.rule, answer.machine, answer.reason): answer for answer in answers}
        old = [answer for answer in self.asked if (answer.rule, answer.machine, answer.reason) not in new]
        self.asked = [*old, *new.values()][-ANSWERS_KEPT:]

    @property
    def tripped(self) -> str:
        """Why the breaker last asked for an operator; empty: it never asked."""
        return next((answer.why for answer in reversed(self.asked) if answer.rule == BREAKER), "")

    @property
    def wanted(self) -> list[str]:
        """Machines that are still in the job although a rule asked for their eviction."""
        left = {eviction.machine for eviction in self.done}
        return sorted({answer.machine for answer in self.asked if answer.yes} - left)

    def approve(self, operator: str) -> None:
        """Note that an operator approved the evictions in ``waiting``."""
        self.approved |= {eviction.machine: operator for eviction in self.waiting}

    def decline(self) -> None:
        """Note that an operator keeps the machines that the rules wanted to evict."""
        self.declined = sorted({*self.declined, *self.wanted})
