"""Makes findings about machines that do not respond: their agents do not answer, or their killed ranks are not gone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Remedy
from everstep.model.recovery_policy import RecoveryPolicy

SILENT = "silent-machine"
"""The reason code of a machine whose agent does not answer."""
DYING = "ranks-not-gone"
"""The reason code of a machine whose killed ranks are not gone."""
NONE_REFUSES: Mapping[str, str] = MappingProxyType({})


def findings_of_silence(
    silent: Mapping[str, float],
    policy: RecoveryPolicy,
    *,
    stepping: Collection[str] = (),
    refusing: Mapping[str, str] = NONE_REFUSES,
    cut_off: bool = False,
) -> list[MachineFinding]:
    """Return a finding for each silent machine: faulty once it was silent for longer than the policy allows.

    Args:
        silent: Machine → seconds since its agent was last heard; only machines whose ranks are silent, too.
        policy: The policy with the time that a machine may be silent.
        stepping: Machines whose ranks step although the agent is silent; their verdict is unknown.
        refusing: Silent machine whose agent is there, but it and the worker do not accept each other → why; the verdict
            of such a machine is unknown.
        cut_off: No machine of the whole cluster answers, so it is not known which machines work.
    """
    allowed_s = math.inf if cut_off else policy.silence.evict_s
    verdicts = {machine: _of_silence(seconds, allowed_s) for machine, seconds in silent.items()}
    verdicts |= dict.fromkeys(stepping, (Health.UNKNOWN, "its agent is silent, and its ranks step: the machine works"))
    verdicts |= {machine: (Health.UNKNOWN, f"the machine works: {why}") for machine, why in refusing.items()}
    return [_finding(machine, verdict, text) for machine, (verdict, text) in verdicts.items()]


def findings_of_dying(
    ranks: Mapping[str, str], seconds: Mapping[str, float], policy: RecoveryPolicy
) -> list[MachineFinding]:
    """Return a finding for each machine whose killed ranks are not gone: faulty once that took longer than is allowed.

    Args:
        ranks: Machine → its ranks that are not gone, for people.
        seconds: Machine → the time since they were killed, seconds.
        policy: The policy with the time that killed ranks have to end.
    """
    allowed_s = policy.stop.evict_s
    return [
        _finding(
            machine,
            Health.UNKNOWN if seconds[machine] < allowed_s else Health.FAULTY,
            f"{text}: killed ranks have {allowed_s:g} s to end",
            reason=DYING,
        )
        for machine, text in ranks.items()
    ]


def _of_silence(seconds: float, allowed_s: float) -> tuple[Health, str]:
    heard = f"nothing was heard from its agent and ranks for {seconds:.1f} s"
    if allowed_s == math.inf:
        return Health.UNKNOWN, f"{heard}: no machine of the cluster answers, the worker may be cut off"
    if seconds < allowed_s:
        return Health.UNKNOWN, f"{heard}: it has {allowed_s:g} s to answer"
    return Health.FAULTY, f"{heard}: it is gone"


def _finding(machine: str, verdict: Health, text: str, reason: str = SILENT) -> MachineFinding:
    source, remedy = FindingSource.SILENCE, Remedy.NOTHING
    finding = Finding(inspection=source, source=source, reason=reason, verdict=verdict, text=text, remedy=remedy)
    return MachineFinding(machine=machine, finding=finding)
