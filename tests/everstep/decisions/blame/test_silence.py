"""Findings about machines that do not do what they should."""

from __future__ import annotations

import pytest

from everstep.decisions.act.evict.rules import rule_of
from everstep.decisions.blame.silence import DYING, SILENT, findings_of_dying, findings_of_silence
from everstep.model.finding import Health
from everstep.model.recovery_policy import RecoveryPolicy

POLICY = RecoveryPolicy(silence={"evict_s": 2}, stop={"evict_s": 15})


@pytest.mark.parametrize(("seconds", "verdict"), [(14.9, Health.UNKNOWN), (15.0, Health.FAULTY)])
def test_killed_ranks_have_some_time_to_end(seconds: float, verdict: Health) -> None:
    [found] = findings_of_dying({"m1": "rank 3 has been dying for 40 s"}, {"m1": seconds}, POLICY)
    assert (found.machine, found.finding.reason, found.finding.verdict) == ("m1", DYING, verdict)
    assert "rank 3" in found.finding.text
    assert rule_of(found.finding).name == "gone-machine"


@pytest.mark.parametrize(("seconds", "verdict"), [(1.9, Health.UNKNOWN), (2.0, Health.FAULTY)])
def test_a_silent_machine_has_some_time_to_answer(seconds: float, verdict: Health) -> None:
    [found] = findings_of_silence({"m1": seconds}, POLICY)
    assert (found.finding.reason, found.finding.verdict) == (SILENT, verdict)


def test_a_machine_whose_agent_refuses_the_worker_is_never_lost() -> None:
    refusing, gone = findings_of_silence({"m0": 600.0, "m1": 600.0}, POLICY, refusing={"m0": "no valid token"})
    assert (refusing.finding.verdict, gone.finding.verdict) == (Health.UNKNOWN, Health.FAULTY)
    assert "no valid token" in refusing.finding.text


def test_no_machine_is_lost_while_no_machine_of_the_cluster_answers() -> None:
    found = findings_of_silence({"m0": 600.0, "m1": 600.0}, POLICY, cut_off=True)
    assert {about.finding.verdict for about in found} == {Health.UNKNOWN}
