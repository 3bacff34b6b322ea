"""The diagnosis from all tests. A machine is faulty only if a test or a comparison names it."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.evict.rules import rule_of
from everstep.decisions.blame.diagnose import reasons
from everstep.decisions.blame.diagnose.compare import BREAKS, below
from everstep.decisions.blame.diagnose.diagnosis import (
    Shares,
    confirmed,
    findings_of_tests,
    judge,
    passed,
    unsure_tests,
)
from everstep.model.diagnosis import BadLink, Diagnosis, DiagnosticResult, MachineDiagnosis, PairResult
from everstep.model.finding import Finding, Health


def ring(count: int, *bad: tuple[int, int], slow: Collection[tuple[int, int]] = ()) -> list[PairResult]:
    found = []
    for one in range(count):
        pair = one, (one + 1) % count
        fine = pair not in bad
        speed = {"bytes_per_second": 1e7 if pair in slow else 1e9} if fine else {}
        found.append(
            PairResult(
                test="nic",
                machines=(f"m{pair[0]}", f"m{pair[1]}"),
                passed=fine,
                text="" if fine else "timed out",
                measures=speed,
            )
        )
    return found


def speeds(**values: float) -> dict[str, list[DiagnosticResult]]:
    return {
        machine: [DiagnosticResult(test="loopback", kind="cpu", measures={"bytes_per_second": value})]
        for machine, value in values.items()
    }


def codes(found: Diagnosis) -> dict[str, list[str]]:
    return {one.machine: [finding.reason for finding in one.findings] for one in found.machines if one.findings}


def test_a_machines_own_finding_decides() -> None:
    bad = Finding(inspection="memory", reason="memory-damaged", sure=True)
    found = judge({"m0": [DiagnosticResult(test="memory")], "m1": [DiagnosticResult(test="memory", findings=[bad])]})

    assert (found.faulty, found.verdict) == (["m1"], Health.FAULTY)


def test_without_a_test_nothing_is_known() -> None:
    found = judge({"m0": [DiagnosticResult(test="dcgm", nothing="no GPU")], "m1": []}, silent={"m2": "no answer"})

    assert [one.verdict for one in found.machines] == [Health.UNKNOWN] * 3
    assert codes(found) == {"m2": [reasons.SILENT.code]}
    assert found.verdict is Health.UNKNOWN


def test_other_bits_name_a_machine_of_three_but_not_of_two() -> None:
    bits = [DiagnosticResult(test="bitwise", kind="cpu", digests={"rank 0": one}) for one in "aaba"]
    four = judge({f"m{n}": [one] for n, one in enumerate(bits)})
    two = judge({f"m{n}": [one] for n, one in enumerate(bits[1:3])})

    assert (four.faulty, codes(four)) == (["m2"], {"m2": [reasons.OTHER_BITS.code]})
    assert (two.faulty, two.verdict) == ([], Health.UNKNOWN)
    assert set(codes(two)) == {"m0", "m1"}


def broken(*how: str, kind: str = "8 x cpu", test: str = "all-to-all") -> dict[str, list[DiagnosticResult]]:
    """Return a result for each machine, with these reasons. If the reason is empty, the machine passes."""
    return {
        f"m{number}": [
            DiagnosticResult(
                test=test,
                kind=f"{kind}, torch 2" if kind and not reason else kind,
                nothing="no GPU" if reason == "nothing" else "",
                findings=[Finding(inspection=test, reason=reason, verdict=Health.UNKNOWN, text="it broke")]
                if reason not in {"", "nothing"}
                else [],
            )
        ]
        for number, reason in enumerate(how)
    }


@pytest.mark.parametrize("reason", sorted(BREAKS))
def test_a_machine_is_at_fault_if_it_breaks_a_test_twice_and_most_machines_pass(reason: str) -> None:
    found = judge(broken("", reason, ""))
    assert (found.faulty, codes(found)["m1"]) == (["m1"], [reasons.FAILS_ALONE.code, reason])
    assert unsure_tests(found.model_copy(update={"tests": ["all-to-all"]})) == ["all-to-all"]
    assert "2 of 3 machines of its kind pass" in found.machines[1].findings[0].text
    assert [rule_of(one.finding).name for one in findings_of_tests(found)] == ["failed-test", "unknown-verdict"]
    assert confirmed(found, found).faulty == ["m1"]
    assert confirmed(found, judge(broken("", "", ""))).faulty == []


def test_only_sure_faults_count_if_the_tests_cannot_be_repeated() -> None:
    damaged = Finding(inspection="memory", reason="memory-damaged", verdict=Health.FAULTY, text="bad", sure=True)
    results = broken("", "test-crashed", "", "")
    results["m2"] = [*results["m2"], DiagnosticResult(test="memory", findings=[damaged])]
    found = judge(results)
    assert found.faulty == ["m1", "m2"]
    only = confirmed(found, None)
    assert only.faulty == ["m2"]


def test_a_different_broken_test_confirms_no_fault() -> None:
    first, second = judge(broken("", "test-crashed", "")), judge(broken("", "test-crashed", "", test="memory"))
    assert first.faulty == second.faulty == ["m1"] and confirmed(first, second).faulty == []


@pytest.mark.parametrize(
    "results",
    [
        broken("", "test-crashed"),
        broken("", "test-crashed", "test-crashed", ""),
        broken("", "test-unable", ""),
        broken("", "test-crashed", "nothing"),
        broken("", "test-crashed", "", kind=""),
        broken("", "other-reason", ""),
        broken("") | {"m8": broken("test-crashed", kind="8 x")["m0"]} | {"m9": broken("")["m0"]},
    ],
)
def test_a_broken_test_is_no_fault_if_most_do_not_pass_or_it_could_not_start(
    results: dict[str, list[DiagnosticResult]],
) -> None:
    assert judge(results).faulty == []


def test_a_result_without_a_kind_has_the_kind_of_the_other_tests() -> None:
    disk, others = broken("", "test-hangs", "", kind="", test="disk"), broken("", "", "")
    silent = {name: [said[0].model_copy(update={"kind": ""}), *others[name]] for name, said in disk.items()}
    assert judge(silent).faulty == ["m1"]


@pytest.mark.parametrize(
    ("pairs", "bad", "links"),
    [
        (ring(4), [], []),
        (ring(4, (1, 2), (2, 3)), ["m2"], []),
        (ring(4, (1, 2)), [], [("m1", "m2")]),
        (ring(5, slow=[(1, 2)]), [], [("m1", "m2")]),
        (ring(2, (0, 1), (1, 0)), [], []),
    ],
)
def test_pairs_name_a_machine_or_a_link(pairs: list[PairResult], bad: list[str], links: list[tuple[str, str]]) -> None:
    tested = {machine: [DiagnosticResult(test="memory")] for pair in pairs for machine in pair.machines}
    found = judge(tested, pairs)

    assert found.faulty == bad
    assert [link.machines for link in found.links] == links
    assert found.verdict is (Health.FAULTY if bad or links else Health.UNKNOWN if len(tested) == 2 else Health.HEALTHY)


def test_a_broken_link_is_a_finding_of_the_later_machine_if_it_fails_twice() -> None:
    tested = {f"m{number}": [DiagnosticResult(test="memory")] for number in range(4)}
    first = judge(tested, ring(4, (3, 0))).model_copy(update={"tests": ["memory", "nic"]})

    assert unsure_tests(first) == ["nic"]
    [only] = findings_of_tests(confirmed(first, first))
    assert (only.machine, only.finding.reason, only.finding.item) == ("m3", reasons.BAD_LINK.code, "m0")
    assert rule_of(only.finding).name == "bad-link"
    assert findings_of_tests(confirmed(first, judge(tested, ring(4)))) == []


def test_the_common_machine_of_several_broken_links_gets_the_findings() -> None:
    tested = {f"m{number}": [DiagnosticResult(test="memory")] for number in range(5)}
    pairs = [*ring(5, (1, 2)), PairResult(test="nic", machines=("m1", "m3"), passed=False, text="timed out")]
    found = judge(tested, pairs)

    assert [link.machines for link in found.links] == [("m1", "m2"), ("m1", "m3")]
    assert [(one.machine, one.finding.item) for one in findings_of_tests(found)] == [("m1", "m2"), ("m1", "m3")]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]), max_size=20))
def test_each_broken_link_is_one_finding_of_its_machine_with_most_of_them(pairs: list[tuple[int, int]]) -> None:
    machines = [MachineDiagnosis(machine=f"m{number}", verdict=Health.HEALTHY) for number in range(8)]
    links = [BadLink(machines=(f"m{a}", f"m{b}"), test="nic", text="timed out") for a, b in pairs]
    found = findings_of_tests(Diagnosis(machines=machines, links=links))

    left = [set(pair) for pair in pairs]
    for number, item in ((int(one.machine[1:]), int(one.finding.item[1:])) for one in found):
        broken = {each: sum(each in pair for pair in left) for each in (number, item)}
        others = found[len(pairs) - len(left) - 1].machine if len(left) < len(pairs) else ""
        if others != f"m{number}":  # the first finding of this machine
            most = max(range(8), key=lambda each: (sum(each in pair for pair in left), each))
            assert number == most, broken
        left.remove({number, item})
    assert left == []


def test_a_bandwidth_far_below_the_others_is_a_fault_and_a_low_one_is_unknown() -> None:
    found = judge(speeds(m0=1e9, m1=1.2e9, m2=4e8, m3=1e8, m4=0.9e9))

    assert codes(found) == {"m2": [reasons.LOW.code], "m3": [reasons.SLOW.code]}
    assert found.faulty == ["m3"]
    assert judge(speeds(m0=1e9, m1=1.2e9, m3=1e8), shares=Shares(slow=0.01, low=0.02)).faulty == []
    [measured] = found.measured
    assert (measured.name, measured.lowest, measured.median) == ("loopback bytes_per_second", "m3", 9e8)


def test_a_disk_is_never_faulty_for_its_bandwidth() -> None:
    said = speeds(m0=1e9, m1=1e9, m2=1e9, m3=1e6)
    found = judge(
        {name: [one.model_copy(update={"test": "disk"}) for one in results] for name, results in said.items()}
    )

    assert (found.faulty, codes(found)) == ([], {"m3": [reasons.LOW.code]})


def test_machines_of_other_kinds_have_other_bandwidths() -> None:
    slow = DiagnosticResult(test="loopback", kind="old", measures={"bytes_per_second": 1e8})
    assert judge(speeds(m0=1e9, m1=1e9, m2=1e9) | {"m3": [slow]}).faulty == []


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(1e3, 1e12), max_size=9), st.floats(0.01, 0.99))
def test_most_figures_are_never_far_below_the_median(figures: dict[str, float], share: float) -> None:
    found = below(figures, share)

    assert len(found) * 2 <= len(figures)
    assert all(0 < part < share for part in found.values())
    if len(figures) < 3:
        assert found == {}


def test_a_pair_of_another_kind_is_not_slow() -> None:
    pairs = ring(5, slow=[(1, 2)])
    old = [one.model_copy(update={"kind": "old" if one.machines == ("m1", "m2") else "new"}) for one in pairs]
    assert passed(old, "nic")["m1", "m2"] is True
    assert judge({}, old).links == []


def test_a_slow_pair_did_not_pass() -> None:
    assert passed(ring(5, slow=[(1, 2)]), "nic")["m1", "m2"] is False
    assert passed(ring(5), "another test") == {}


def test_the_short_form_of_a_diagnosis_has_the_same_faults() -> None:
    bits = {f"rank {rank} gradients": "a" * 64 for rank in range(8)}
    many = {f"m{n}": [DiagnosticResult(test="bitwise", kind="cpu", digests=bits)] for n in range(100)}
    many["m7"] = [DiagnosticResult(test="bitwise", kind="cpu", digests=bits | {"rank 3 gradients": "b"})]
    found = judge(many, ring(100))

    assert found.short().faulty == found.faulty == ["m7"]
    assert found.short().measured == found.measured
    assert len(found.short().model_dump_json()) < 20_000 < len(found.model_dump_json())


def test_an_unsure_fault_counts_only_if_it_is_confirmed() -> None:
    figures = {"m0": 100.0, "m1": 100.0, "m2": 100.0, "m3": 5.0}
    first, second = judge(speeds(**figures)), judge(speeds(**(figures | {"m2": 5.0, "m3": 100.0})))
    assert (first.faulty, second.faulty) == (["m3"], ["m2"])
    once = confirmed(first, second)
    assert (once.faulty, once.machines[3].verdict) == ([], Health.UNKNOWN)
    assert confirmed(first, first).machines == first.machines


@pytest.mark.parametrize(
    ("bad", "slow", "sure"),
    [
        ([(3, 4), (4, 5)], [], True),
        ([], [(3, 4), (4, 5)], False),
        ([(3, 4)], [(4, 5)], False),
    ],
)
def test_a_machine_that_is_named_for_slow_pairs_is_tested_a_second_time(
    bad: list[tuple[int, int]], slow: list[tuple[int, int]], sure: bool
) -> None:
    tested = {f"m{number}": [DiagnosticResult(test="memory")] for number in range(8)}
    first = judge(tested, ring(8, *bad, slow=slow)).model_copy(update={"tests": ["nic"]})
    assert first.faulty == ["m4"] and unsure_tests(first) == ([] if sure else ["nic"])
    assert confirmed(first, first).faulty == ["m4"]
    assert confirmed(first, judge(tested, ring(8))).faulty == (["m4"] if sure else [])


def test_a_machine_that_fails_in_two_pairs_is_a_sure_fault_despite_a_slow_pair() -> None:
    pairs = ring(8, (3, 4), (4, 5))
    slow = PairResult(test="nic", machines=("m1", "m4"), passed=True, measures={"bytes_per_second": 1e7})
    found = judge({f"m{number}": [DiagnosticResult(test="memory")] for number in range(8)}, [*pairs, slow])
    assert found.faulty == ["m4"] and unsure_tests(found.model_copy(update={"tests": ["nic"]})) == []


def test_a_sure_fault_needs_no_second_test() -> None:
    sure = Finding(inspection="memory", reason="memory-damaged", sure=True)
    found = judge({"m0": [DiagnosticResult(test="memory", findings=[sure])]})
    assert unsure_tests(found) == [] and confirmed(found, Diagnosis()).faulty == ["m0"]


def test_only_tests_with_an_unsure_fault_are_repeated() -> None:
    found = judge(speeds(m0=100.0, m1=100.0, m2=100.0, m3=5.0))
    [test] = {one.inspection for one in found.machines[3].findings}
    assert unsure_tests(found.model_copy(update={"tests": ["bitwise", test]})) == [test]
