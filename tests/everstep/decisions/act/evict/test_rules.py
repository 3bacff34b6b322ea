"""Each eviction rule: when it evicts a machine, and what it answers otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.evict.rules import OPERATOR, RULES, mode_of, rule_of, waits_for_another
from everstep.decisions.blame.alerts import LINKS_DOWN
from everstep.decisions.blame.hang.analysis import findings_of_hang
from everstep.decisions.blame.replay.compare_groups import findings_of_replay
from everstep.decisions.blame.silence import findings_of_silence
from everstep.decisions.blame.slow.by_samples import findings_of_vote
from everstep.model.eviction import EvictMode
from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Owner
from everstep.model.hang import HangConclusion, HangResult
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import ReplayConclusion, Replayed
from everstep.model.slow import SlowConclusion, SlowResult
from tests.everstep.decisions.act.evict.evict_facts import EIGHT, NOW, S, evicted, flap, found, link_down, plan, silent

SURE, ALERT, GONE = "sure-machine-fault", "repeated-network-alert", "gone-machine"
CULPRIT, GROUP = "hang-culprit", "hang-group"


def why_not(machine: str, *findings: MachineFinding, **fields: Any) -> tuple[str, str]:
    """Return the rule and the text of the only answer about a machine. The machine must not be evicted."""
    decided = plan(*findings, **fields)
    assert not decided.evict + decided.ask + decided.shadow
    (answer,) = [answer for answer in decided.asked if answer.machine == machine]
    assert not answer.yes
    return answer.rule, answer.why


def test_a_sure_fault_of_the_machine_evicts_it() -> None:
    decided = plan(found("m3", item="GPU 2", text="it fell off the bus"))

    assert evicted(decided) == [("m3", SURE)]
    assert decided.evict[0].reason == "gpu-lost"
    assert decided.evict[0].why == "GPU 2: it fell off the bus: it names this machine for sure"
    assert [(answer.rule, answer.yes, answer.mode) for answer in decided.asked] == [(SURE, True, EvictMode.ACT)]


def test_several_machines_are_evicted_each_for_its_own_fault() -> None:
    assert evicted(plan(found("m5", "disk-failed"), found("m3"))) == [("m3", SURE), ("m5", SURE)]


def test_a_machine_of_another_job_is_not_asked_about() -> None:
    assert plan(found("elsewhere")).asked == []


def test_a_fault_that_most_machines_have_evicts_none_of_them() -> None:
    shared = [found(machine, "gpu-cleanup") for machine in EIGHT[:5]]

    assert why_not("m0", *shared) == (
        SURE,
        "gpu-cleanup: 5 of 8 machines have gpu-cleanup now: the cause is shared by them",
    )
    assert evicted(plan(*shared, found("m1", "disk-failed"))) == [("m1", SURE)], (
        "m1 has a fault that no other machine has, so it is evicted"
    )


def test_a_fault_that_half_of_the_machines_have_evicts_them() -> None:
    half = plan(*(found(machine) for machine in EIGHT[:4]), policy=RecoveryPolicy(evict={"share": 1}))

    assert [eviction.machine for eviction in half.evict] == ["m0", "m1", "m2", "m3"]


@pytest.mark.parametrize("machines", [("m0", "m1"), ("m0", "m1", "m2")])
def test_a_fault_that_all_machines_of_a_small_job_have_evicts_none_of_them(machines: tuple[str, ...]) -> None:
    assert evicted(plan(*(found(machine) for machine in machines), machines=machines)) == []


@pytest.mark.parametrize(
    ("faulty", "machines"), [(("m0",), ("m0",)), (("m0",), ("m0", "m1")), (("m0", "m1"), ("m0", "m1", "m2"))]
)
def test_a_fault_that_some_machines_of_a_small_job_have_evicts_them(
    faulty: tuple[str, ...], machines: tuple[str, ...]
) -> None:
    leaving = plan(
        *(found(machine) for machine in faulty), machines=machines, policy=RecoveryPolicy(evict={"share": 1})
    )

    assert [eviction.machine for eviction in (*leaving.evict, *leaving.ask)] == list(faulty)


@pytest.mark.parametrize("alert", [flap, link_down])
def test_one_network_alert_is_tolerated(alert: Callable[[str], MachineFinding]) -> None:
    assert why_not("m2", alert("m2"))[0] == ALERT


@pytest.mark.parametrize("first", [flap("m2", ago_s=200), link_down("m2", "eth1", ago_s=300)])
def test_the_second_network_alert_within_five_minutes_evicts(first: MachineFinding) -> None:
    decided = plan(link_down("m2"), earlier=(first,))

    assert evicted(decided) == [("m2", ALERT)]
    assert decided.evict[0].reason == "nic-down"


@pytest.mark.parametrize(
    "first",
    [
        link_down("m2", ago_s=302),  # this alert is too long ago
        link_down("m3", ago_s=100),  # this is another machine
        link_down("m2", ago_s=1),  # this is the same alert
        link_down("m2", "eth1", ago_s=20),  # a switch may have caused both, since they are close in time
        found("m2", "packet-loss", ago_s=100, owner=Owner.NETWORK, verdict=Health.UNKNOWN),  # this is no alert
        found("m2", "disk-failed", ago_s=100),  # this is no network fault
    ],
)
def test_findings_that_are_no_second_alert(first: MachineFinding) -> None:
    assert why_not("m2", link_down("m2"), earlier=(first,))[0] == ALERT


@pytest.mark.parametrize("reason", sorted(LINKS_DOWN))
def test_a_link_that_is_still_down_when_the_job_stops_evicts(reason: str) -> None:
    owner = Owner.MACHINE if reason.endswith("missing") else Owner.NETWORK
    down = found("m2", reason, item="eth0", ago_s=20, inspection="link", owner=owner, sure=False)

    assert evicted(plan(down)) == [("m2", ALERT)]
    assert why_not("m2", down, stopped=False)[0] == ALERT, "a first alert evicts no machine while the job steps"


@pytest.mark.parametrize(
    "alert",
    [
        link_down("m2", ago_s=5),  # it may be a flap
        flap("m2", ago_s=20),  # the link came back
        found("m2", "nic-slow", ago_s=20, owner=Owner.NETWORK, sure=False),  # the link is slower, but not down
    ],
)
def test_a_link_that_is_not_down_for_good_is_tolerated_when_the_job_stops(alert: MachineFinding) -> None:
    assert why_not("m2", alert)[0] == ALERT


def test_a_link_that_no_job_uses_evicts_no_machine() -> None:
    unused = found("m2", "nic-down", ago_s=20, verdict=Health.UNKNOWN, owner=Owner.UNKNOWN, sure=False)

    assert why_not("m2", unused, earlier=(unused,))[0] == "unknown-verdict"


def test_a_switch_that_is_down_for_good_evicts_no_machine() -> None:
    assert evicted(plan(*(link_down(machine, ago_s=60) for machine in EIGHT))) == []


def test_a_link_that_the_monitor_saw_down_twice_evicts() -> None:
    again = found("m2", "nic-flap-repeated", owner=Owner.NETWORK, verdict=Health.UNKNOWN, sure=False)

    assert evicted(plan(flap("m2", ago_s=4), again)) == [("m2", ALERT)]


def test_the_end_of_a_long_outage_is_no_second_alert() -> None:
    """An outage is reported at its begin, and again as a flap at its end. Both are one alert."""
    began = link_down("m2", ago_s=100), link_down("m2", "eth1", ago_s=99)

    decided = plan(flap("m2", ago_s=30), flap("m2", "eth1", ago_s=28), earlier=began)

    assert decided.evict == []
    assert {answer.rule for answer in decided.asked} == {ALERT}


def test_a_switch_that_flaps_twice_evicts_no_machine() -> None:
    first = tuple(flap(machine, ago_s=200) for machine in EIGHT)

    decided = plan(*(flap(machine) for machine in EIGHT), earlier=first)

    assert decided.evict + decided.ask == []


def test_a_machine_that_went_silent_is_evicted_after_a_while() -> None:
    decided = plan(*silent(m4=2.0))

    assert evicted(decided) == [("m4", GONE)]
    assert decided.evict[0].reason == "silent-machine"
    assert why_not("m4", *silent(m4=1.9)) == (
        GONE,
        "nothing was heard from its agent and ranks for 1.9 s: it has 2 s to answer",
    )


@pytest.mark.parametrize("quiet", [{}, {"m4": 60.0}])
def test_a_silent_agent_evicts_no_machine_whose_ranks_step(quiet: dict[str, float]) -> None:
    assert why_not("m4", *findings_of_silence(quiet, RecoveryPolicy(), stepping={"m4"})) == (
        GONE,
        "its agent is silent, and its ranks step: the machine works",
    )


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"owner": Owner.CODE}, "application-caused"),
        ({"owner": Owner.DATA}, "application-caused"),
        ({"owner": Owner.CODE, "verdict": Health.UNKNOWN}, "application-caused"),
        ({"verdict": Health.UNKNOWN}, "unknown-verdict"),
        ({"verdict": Health("worn")}, "unknown-verdict"),
        ({"verdict": Health.UNKNOWN, "owner": Owner.STORAGE}, "unknown-verdict"),
        ({"verdict": Health.UNKNOWN, "owner": Owner.NETWORK}, "unknown-verdict"),
        ({"sure": False}, "unsure-fault"),
        ({"owner": Owner.STORAGE}, "other-owner"),
        ({"owner": Owner.UNKNOWN}, "other-owner"),
        ({"owner": Owner("neighbour")}, "other-owner"),
    ],
)
def test_a_finding_that_evicts_no_machine_is_answered_by_a_rule(fields: dict[str, Any], rule: str) -> None:
    assert why_not("m1", found("m1", **fields))[0] == rule


def test_suspects_of_a_replay_are_evicted_unless_they_are_more_than_half_of_the_machines() -> None:
    replayed = Replayed(found=ReplayConclusion.SEVERAL, text="m1 and m2 are in every group", suspects=["m1", "m2"])
    findings = findings_of_replay(replayed)
    assert not any(about.finding.sure for about in findings)
    assert evicted(plan(*findings)) == [("m1", "failed-replay"), ("m2", "failed-replay")]
    many = plan(*findings_of_replay(replayed.model_copy(update={"suspects": list(EIGHT[:5])})))
    assert evicted(many) == []


def test_a_healthy_part_leads_to_no_answer() -> None:
    assert plan(found("m1", verdict=Health.HEALTHY)).asked == []


def test_a_broken_link_evicts_one_machine_and_many_broken_links_evict_none() -> None:
    def cut(machine: str) -> MachineFinding:
        fields: dict[str, Any] = {"owner": Owner.NETWORK, "sure": False, "source": FindingSource.TEST}
        return found(machine, "bad-link", text="the link between it and m0 does not work", **fields)

    assert evicted(plan(cut("m3"))) == [("m3", "bad-link")]
    assert why_not("m1", *(cut(machine) for machine in EIGHT[1:6]))[0] == "bad-link"


def test_the_names_of_rules_do_not_change() -> None:
    """Job files, reports and dashboards use these names, so they must not change."""
    assert [rule.name for rule in RULES if rule.evicts] == [
        OPERATOR,
        SURE,
        ALERT,
        GONE,
        "failed-test",
        "bad-link",
        "failed-replay",
        "repeated-errors",
        CULPRIT,
        GROUP,
        "slow-machine",
    ]
    assert [rule.name for rule in RULES if not rule.evicts] == [
        "application-caused",
        "unknown-verdict",
        "unsure-fault",
        "other-owner",
    ]


@pytest.mark.parametrize(
    ("ceiling", "own", "mode"),
    [
        ("act", "act", "act"),
        ("act", "shadow", "shadow"),
        ("approve", "act", "approve"),
        ("shadow", "approve", "shadow"),
        ("off", "act", "off"),
        ("act", "from a later release", "approve"),
        ("from a later release", "shadow", "shadow"),
    ],
)
def test_the_mode_of_a_rule_is_limited_by_that_of_the_policy(ceiling: str, own: str, mode: str) -> None:
    policy = RecoveryPolicy(evict={"mode": EvictMode(ceiling), "rules": {SURE: EvictMode(own)}})

    assert mode_of(next(rule for rule in RULES if rule.name == SURE), policy) == mode


def test_two_active_alerts_count_together_however_long_ago_they_began() -> None:
    later = plan(link_down("m2"), earlier=(flap("m2", ago_s=200),), now_ns=NOW + 900 * S)

    assert evicted(later) == [("m2", ALERT)]


NAMED = HangResult(
    generation=3, conclusion=HangConclusion.NAMES, machines=["m1"], suspects=["m1"], reason="7 ranks wait for it"
)
GROUP_OF_TWO = HangResult(
    generation=3,
    conclusion=HangConclusion.OVER_EVICTS,
    machines=["m1", "m3"],
    suspects=["m1"],
    innocent=1,
    reason="all on m1, m3",
)


@pytest.mark.parametrize(
    ("hang", "evictions"), [(NAMED, [("m1", CULPRIT)]), (GROUP_OF_TWO, [("m1", GROUP), ("m3", GROUP)])]
)
def test_a_hang_evicts_its_culprit_or_a_parallel_group(hang: HangResult, evictions: list[tuple[str, str]]) -> None:
    decided = plan(*findings_of_hang(hang))
    assert evicted(decided) == evictions
    on_purpose = ["it leaves on purpose" in eviction.why for eviction in decided.evict]
    assert on_purpose == [machine not in hang.suspects for machine in hang.machines]


@pytest.mark.parametrize("conclusion", ["not a machine", "not hung", "nothing known", "from a later release"])
def test_a_hang_that_names_no_machine_evicts_none(conclusion: str) -> None:
    hang = HangResult(generation=3, conclusion=HangConclusion(conclusion), reason="why")
    assert findings_of_hang(hang) == []


@pytest.mark.parametrize("machines", [[], ["m1"]])
def test_a_vote_evicts_a_machine_only_if_its_own_past_agrees(machines: list[str]) -> None:
    vote = SlowResult(generation=3, conclusion=SlowConclusion.MACHINE, suspects=["m1"], machines=machines)
    decided = plan(*findings_of_vote(vote))
    assert [(answer.rule, answer.yes) for answer in decided.asked] == [("slow-machine", bool(machines))]


def test_only_after_a_hang_the_job_does_not_wait_for_a_replacement() -> None:
    assert {rule.name for rule in RULES if not waits_for_another(rule.name)} == {CULPRIT, GROUP}
    assert waits_for_another("standby-unfit")


findings = st.builds(
    Finding,
    inspection=st.just("any"),
    reason=st.sampled_from(["gpu-lost", "nic-flap", "nic-flap-repeated"]),
    source=st.sampled_from([*FindingSource, FindingSource("neighbour")]),
    verdict=st.sampled_from([Health.FAULTY, Health.UNKNOWN, Health("worn")]),
    owner=st.sampled_from([*Owner, Owner("neighbour")]),
    sure=st.booleans(),
)


@given(findings)
def test_each_finding_has_one_answer_and_an_unsure_finding_evicts_no_machine(finding: Finding) -> None:
    [answer] = plan(MachineFinding(machine="m1", finding=finding)).asked

    assert answer.rule == rule_of(finding).name
    if finding.verdict is not Health.FAULTY:
        assert not answer.yes or finding.reason == "nic-flap-repeated"
    if finding.source is FindingSource.INSPECTION and not finding.sure:
        assert not answer.yes or finding.owner is Owner.NETWORK
