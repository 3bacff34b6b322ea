"""Machines that do not answer, as findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Remedy
from everstep.model.recovery_policy import RecoveryPolicy

SILENT = "silent-machine"
"""Reason code of a finding that rests on silence alone."""


def findings_of_silence(
    silent: Mapping[str, float], policy: RecoveryPolicy, *, stepping: Collection[str] = ()
) -> list[MachineFinding]:
    """A finding for each machine that does not answer: faulty once it had its time to answer.

    Args:
        silent: Machine → seconds since anything was heard from its agent; only machines whose ranks are silent too.
        policy: How long a machine may be silent.
        stepping: Machines whose ranks step although the agent is silent.
    """
    about = {machine: _about(seconds, policy) for machine, seconds in silent.items()}
    about |= dict.fromkeys(stepping, (Health.UNKNOWN, "its agent is silent, and its ranks step: the machine works"))
    return [_finding(machine, *known) for machine, known in about.items()]


def _about(seconds: float, policy: RecoveryPolicy) -> tuple[Health, str]:
    heard = f"nothing was heard from its agent and ranks for {seconds:.1f} s"
    if seconds < policy.silence.evict_s:
        return Health.UNKNOWN, f"{heard}: it has {policy.silence.evict_s:g} s to answer"
    return Health.FAULTY, f"{heard}: it is gone"


def _finding(machine: str, verdict: Health, text: str) -> MachineFinding:
    source, remedy = FindingSource.SILENCE, Remedy.NOTHING
    finding = Finding(inspection=source, source=source, reason=SILENT, verdict=verdict, text=text, remedy=remedy)
    return MachineFinding(machine=machine, finding=finding)
