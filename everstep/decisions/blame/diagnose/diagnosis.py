"""The diagnosis from all tests of several machines: each machine's own findings, and the results of comparisons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from everstep.base.text import size_text
from everstep.decisions.blame.diagnose import reasons
from everstep.decisions.blame.diagnose.compare import LOW_SHARE, SLOW_SHARE, Computed, below, compare, failing
from everstep.decisions.blame.diagnose.pairs import Pair, judge_pairs, pair_of
from everstep.model.diagnosis import (
    SPEED,
    STEADY,
    BadLink,
    Diagnosis,
    DiagnosticResult,
    MachineDiagnosis,
    Measured,
    PairResult,
)
from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, verdict_of, worst_first


@dataclass(frozen=True, slots=True)
class Shares:
    """Thresholds of bandwidths, as shares of the median."""

    slow: float = SLOW_SHARE
    low: float = LOW_SHARE


def judge(
    results: Mapping[str, Sequence[DiagnosticResult]],
    pairs: Sequence[PairResult] = (),
    silent: Mapping[str, str] | None = None,
    shares: Shares | None = None,
) -> Diagnosis:
    """Return the verdict on every machine.

    Args:
        results: Machine → the results of its own tests.
        pairs: The results of tests between two machines.
        silent: Machine → why its tests could not be run at all.
        shares: The shares of the other machines' bandwidth below which a bandwidth is reported.
    """
    shares, silent = shares or Shares(), silent or {}
    machines = [*results, *(one for one in silent if one not in results)]
    found: dict[str, list[Finding]] = {
        machine: [finding for result in results.get(machine, ()) for finding in result.findings] for machine in machines
    }
    for machine, why in silent.items():
        found[machine].append(reasons.SILENT.finding("diagnose", text=why))
    for machine, tests in failing(results).items():
        found[machine] += [
            reasons.FAILS_ALONE.finding(test, text=f"{reasons.FAILS_ALONE.means}: {how}") for test, how in tests.items()
        ]
    _compare_bits(results, found)
    _compare_bandwidths(results, shares, found)
    links = _compare_pairs(machines, pairs, shares, found)
    tested = {machine for machine, said in results.items() if any(not one.nothing for one in said)}
    tested |= {machine for pair in pairs if pair.passed for machine in pair.machines}
    return Diagnosis(
        machines=[
            MachineDiagnosis(
                machine=machine,
                verdict=_verdict(found[machine], tested=machine in tested),
                findings=worst_first(found[machine]),
                results=list(results.get(machine, ())),
            )
            for machine in machines
        ],
        links=links,
        pairs=list(pairs),
        measured=_measured(results, pairs),
    )


def confirmed(first: Diagnosis, second: Diagnosis | None) -> Diagnosis:
    """Return the first of two diagnoses, without its unsure faults that the second diagnosis does not show.

    A single low bandwidth may be caused by other work on that machine: it is measured again before it is a fault. A
    test that breaks, and a fault between two machines, are repeated too. Without a second diagnosis only the sure
    faults count.

    Args:
        first: The diagnosis of all tests.
        second: The diagnosis of the repeated tests, whose faults were not sure; None: it could not be carried out.
    """

    def key(machine: str, finding: Finding) -> tuple[str, str, str]:
        return machine, finding.inspection, finding.reason

    not_again = "not so the next time" if second else "it could not be tested once more"
    second = second or Diagnosis()
    links = [link for link in first.links if any(other.machines == link.machines for other in second.links)]
    again = {key(one.machine, finding) for one in second.machines for finding in one.findings}
    machines = []
    for one in first.machines:
        findings = worst_first(
            finding
            if finding.sure or finding.verdict is not Health.FAULTY or key(one.machine, finding) in again
            else finding.model_copy(update={"verdict": Health.UNKNOWN, "text": f"{finding.text}; {not_again}"})
            for finding in one.findings
        )
        verdict = _verdict(findings, tested=one.verdict is not Health.UNKNOWN or bool(findings))
        machines.append(one.model_copy(update={"findings": findings, "verdict": verdict}))
    seconds = first.seconds + second.seconds
    return first.model_copy(update={"machines": machines, "links": links, "seconds": seconds})


def unsure_tests(found: Diagnosis) -> list[str]:
    """Tests with a fault that is to be seen twice before it counts, in the order in which they were run."""
    tests = {
        finding.inspection
        for machine in found.machines
        for finding in machine.findings
        if finding.verdict is Health.FAULTY and not finding.sure
    }
    tests |= {link.test for link in found.links}
    return [test for test in found.tests if test in tests]


def passed(pairs: Sequence[PairResult], test: str, shares: Shares | None = None) -> dict[Pair, bool | None]:
    """Return pair → whether it passed a test; a pair that is far slower than other pairs did not pass."""
    of_test = [pair for pair in pairs if pair.test == test]
    slow = _slow_pairs(of_test, (shares or Shares()).slow)
    return {pair_of(*pair.machines): pair.passed and pair_of(*pair.machines) not in slow for pair in of_test}


def _verdict(findings: Sequence[Finding], *, tested: bool) -> Health:
    """Judge a machine; without any test its health is unknown."""
    return verdict_of(findings) if findings or tested else Health.UNKNOWN


def _compare_bits(results: Mapping[str, Sequence[DiagnosticResult]], found: dict[str, list[Finding]]) -> None:
    tests = dict.fromkeys(one.test for said in results.values() for one in said if one.digests)
    for test in tests:
        computed = {
            machine: Computed(one.kind, one.digests)
            for machine, said in results.items()
            for one in said
            if one.test == test and one.digests and one.verdict is Health.HEALTHY
        }
        kinds = {machine: one.kind for machine, one in computed.items()}
        for machine, said in compare(computed).items():
            if said.agrees is False:
                found[machine].append(reasons.OTHER_BITS.finding(test, "", kinds[machine], text=said.text))
            elif said.agrees is None:
                found[machine].append(reasons.UNCOMPARED.finding(test, "", kinds[machine], text=said.text))


def _compare_bandwidths(
    results: Mapping[str, Sequence[DiagnosticResult]], shares: Shares, found: dict[str, list[Finding]]
) -> None:
    figures: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for machine, said in results.items():
        for one in said:
            for name, value in one.measures.items():
                if name.partition("{")[0].endswith(SPEED):
                    figures[one.test, one.kind, name][machine] = value
    for (test, _, name), values in figures.items():
        usual = median(values.values())
        for machine, share in below(values, shares.low).items():
            reason = reasons.SLOW if share < shares.slow and test in STEADY else reasons.LOW
            text = f"{size_text(values[machine])}/s, {share:.0%} of what is usual here"
            found[machine].append(
                reason.finding(test, name, f"median of {len(values)}: {size_text(usual)}/s", text=text)
            )


def _slow_pairs(pairs: Sequence[PairResult], share: float) -> dict[Pair, float]:
    """Pairs that passed, and are far slower than most of their kind that did."""
    figures: dict[tuple[str, str], dict[Pair, float]] = defaultdict(dict)
    for pair in pairs:
        if pair.passed:
            for name, value in pair.measures.items():
                figures[pair.kind, name][pair_of(*pair.machines)] = value
    return {pair: part for values in figures.values() for pair, part in below(values, share).items()}


def _compare_pairs(
    machines: Sequence[str], pairs: Sequence[PairResult], shares: Shares, found: dict[str, list[Finding]]
) -> list[BadLink]:
    links = []
    for test in dict.fromkeys(pair.test for pair in pairs):
        of_test = [pair for pair in pairs if pair.test == test]
        met = {machine for pair in of_test for machine in pair.machines}
        involved = [machine for machine in machines if machine in met]
        slow = _slow_pairs(of_test, shares.slow)
        texts = {pair_of(*pair.machines): pair.text for pair in of_test} | {
            pair: f"{share:.0%} of the usual bandwidth" for pair, share in slow.items()
        }
        seen = passed(of_test, test, shares)
        said = judge_pairs(involved, seen)
        # A bandwidth may be low for other work: who is named only with pairs that are slow is tested once more.
        sure = judge_pairs(involved, seen | dict.fromkeys(slow)).machines
        links += [BadLink(machines=pair, test=test, text=texts[pair]) for pair in said.links]
        for names, reason in ((said.machines, reasons.FAILS_WITH_ALL), (said.unsure, reasons.FAILS_UNSURE)):
            for machine in names:
                own = [pair for pair in texts if machine in pair and texts[pair]]
                lines = [f"{' and '.join(pair)}: {texts[pair]}" for pair in own]
                found[machine].append(reason.finding(test, "", *lines).model_copy(update={"sure": machine in sure}))
    return links


def _measured(results: Mapping[str, Sequence[DiagnosticResult]], pairs: Sequence[PairResult]) -> list[Measured]:
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    for machine, said in results.items():
        for one in said:
            for name, value in one.measures.items():
                figures[f"{one.test} {name}"][machine] = value
    for pair in pairs:
        for name, value in pair.measures.items():
            figures[f"{pair.test} {name}"][" and ".join(pair.machines)] = value
    return [
        Measured(
            name=name,
            machines=len(values),
            low=min(values.values()),
            lowest=min(values, key=values.__getitem__),
            median=median(values.values()),
            high=max(values.values()),
        )
        for name, values in figures.items()
    ]


def findings_of_tests(found: Diagnosis) -> list[MachineFinding]:
    """Return every finding with its machine, faults first; findings of broken links are included."""
    own = [(one.machine, finding) for one in found.machines for finding in one.findings]
    said = [
        MachineFinding(machine=machine, finding=finding.model_copy(update={"source": FindingSource.TEST}))
        for machine, finding in [*own, *_of_links(found)]
    ]
    return sorted(said, key=lambda one: one.finding.verdict != "faulty")


def _of_links(found: Diagnosis) -> list[tuple[str, Finding]]:
    """Return the machines without which all remaining links work.

    A broken link cannot be blamed on either of its machines, and the job cannot run over it. The machine with the most
    broken links gets the finding; of two equal machines the later machine, which does not have the rendezvous store.
    """
    left, said = list(found.links), []
    order = list(
        dict.fromkeys([*(one.machine for one in found.machines), *(one for link in left for one in link.machines)])
    )
    while left:
        machine = max(order, key=lambda one: (sum(one in link.machines for link in left), order.index(one)))
        for link in [link for link in left if machine in link.machines]:
            other = next(one for one in link.machines if one != machine)
            text = f"the link between it and {other} does not work, and both work with others"
            said.append((machine, reasons.BAD_LINK.finding(link.test, other, link.text, text=text)))
            left.remove(link)
    return said
