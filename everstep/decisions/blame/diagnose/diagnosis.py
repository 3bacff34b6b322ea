"""Diagnoses machines from the results of their own tests and from comparisons between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
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
        shares: The thresholds of bandwidths.
    """
    shares, silent = shares or Shares(), silent or {}
    machines = [*results, *(machine for machine in silent if machine not in results)]
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
    tested = {machine for machine, own in results.items() if any(not result.nothing for result in own)}
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
    """Return the first of two diagnoses, without the unsure faults that the second one does not confirm.

    Other work on a machine may lower a bandwidth, break a test, or disturb a pair of machines once. Without a second
    diagnosis, only sure faults count.

    Args:
        first: The diagnosis of all tests.
        second: The diagnosis of the tests with unsure faults, which were repeated; None: they could not be repeated.
    """

    def key(machine: str, finding: Finding) -> tuple[str, str, str]:
        return machine, finding.inspection, finding.reason

    unconfirmed = "a second test did not confirm it" if second else "it could not be tested a second time"
    second = second or Diagnosis()
    still_broken = {link.machines for link in second.links}
    links = [link for link in first.links if link.machines in still_broken]
    again = {key(tested.machine, finding) for tested in second.machines for finding in tested.findings}
    machines = []
    for tested in first.machines:
        findings = worst_first(
            finding
            if finding.sure or finding.verdict is not Health.FAULTY or key(tested.machine, finding) in again
            else finding.model_copy(update={"verdict": Health.UNKNOWN, "text": f"{finding.text}; {unconfirmed}"})
            for finding in tested.findings
        )
        verdict = _verdict(findings, tested=tested.verdict is not Health.UNKNOWN or bool(findings))
        machines.append(tested.model_copy(update={"findings": findings, "verdict": verdict}))
    seconds = first.seconds + second.seconds
    return first.model_copy(update={"machines": machines, "links": links, "seconds": seconds})


def unsure_tests(diagnosis: Diagnosis) -> list[str]:
    """Return the tests that found an unsure fault, in the order of tests.

    Such a fault counts only if a second test confirms it.
    """
    tests = {
        finding.inspection
        for machine in diagnosis.machines
        for finding in machine.findings
        if finding.verdict is Health.FAULTY and not finding.sure
    }
    tests |= {link.test for link in diagnosis.links}
    return [test for test in diagnosis.tests if test in tests]


def passed(pairs: Sequence[PairResult], test: str, shares: Shares | None = None) -> dict[Pair, bool | None]:
    """Return pair → whether it passed a test; a pair that is far slower than other pairs has not passed."""
    of_test = [pair for pair in pairs if pair.test == test]
    slow = _slow_pairs(of_test, (shares or Shares()).slow)
    return {pair_of(*pair.machines): pair.passed and pair_of(*pair.machines) not in slow for pair in of_test}


def _verdict(findings: Sequence[Finding], *, tested: bool) -> Health:
    """Return the verdict on a machine: unknown if it was not tested and has no finding."""
    return verdict_of(findings) if findings or tested else Health.UNKNOWN


def _compare_bits(results: Mapping[str, Sequence[DiagnosticResult]], found: dict[str, list[Finding]]) -> None:
    tests = dict.fromkeys(result.test for own in results.values() for result in own if result.digests)
    for test in tests:
        computed = {
            machine: Computed(result.kind, result.digests)
            for machine, own in results.items()
            for result in own
            if result.test == test and result.digests and result.verdict is Health.HEALTHY
        }
        for machine, compared in compare(computed).items():
            if not compared.agrees:
                reason = reasons.UNCOMPARED if compared.agrees is None else reasons.OTHER_BITS
                found[machine].append(reason.finding(test, "", computed[machine].kind, text=compared.text))


def _compare_bandwidths(
    results: Mapping[str, Sequence[DiagnosticResult]], shares: Shares, found: dict[str, list[Finding]]
) -> None:
    figures: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for machine, own in results.items():
        for result in own:
            for name, value in result.measures.items():
                if name.partition("{")[0].endswith(SPEED):
                    figures[result.test, result.kind, name][machine] = value
    for (test, _, name), values in figures.items():
        usual = median(values.values())
        for machine, share in below(values, shares.low).items():
            reason = reasons.SLOW if share < shares.slow and test in STEADY else reasons.LOW
            text = f"{size_text(values[machine])}/s, {share:.0%} of the usual bandwidth"
            found[machine].append(
                reason.finding(test, name, f"median of {len(values)}: {size_text(usual)}/s", text=text)
            )


def _slow_pairs(pairs: Sequence[PairResult], share: float) -> dict[Pair, float]:
    """Return the pairs that are far slower than most pairs of their kind: pair → its share of the usual bandwidth."""
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
        pair_passed = passed(of_test, test, shares)
        judged = judge_pairs(involved, pair_passed)
        # Other work may lower a bandwidth. So a machine is surely faulty only if it is also named when the slow pairs
        # are left out.
        sure = judge_pairs(involved, pair_passed | dict.fromkeys(slow)).machines
        links += [BadLink(machines=pair, test=test, text=texts[pair]) for pair in judged.links]
        lines: dict[str, list[str]] = defaultdict(list)
        for pair, text in texts.items():
            for machine in pair if text else ():
                lines[machine].append(f"{' and '.join(pair)}: {text}")
        for names, reason in ((judged.machines, reasons.FAILS_WITH_ALL), (judged.unsure, reasons.FAILS_UNSURE)):
            for machine in names:
                finding = reason.finding(test, "", *lines[machine])
                found[machine].append(finding.model_copy(update={"sure": machine in sure}))
    return links


def _measured(results: Mapping[str, Sequence[DiagnosticResult]], pairs: Sequence[PairResult]) -> list[Measured]:
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    for machine, own in results.items():
        for result in own:
            for name, value in result.measures.items():
                figures[f"{result.test} {name}"][machine] = value
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


def findings_of_tests(diagnosis: Diagnosis) -> list[MachineFinding]:
    """Return all findings of machines and of broken links, faults first."""
    own = [(tested.machine, finding) for tested in diagnosis.machines for finding in tested.findings]
    findings = [
        MachineFinding(machine=machine, finding=finding.model_copy(update={"source": FindingSource.TEST}))
        for machine, finding in [*own, *_of_links(diagnosis)]
    ]
    return sorted(findings, key=lambda found: found.finding.verdict != "faulty")


def _of_links(diagnosis: Diagnosis) -> list[tuple[str, Finding]]:
    """Return findings for broken links. If the machines with these findings leave the job, no broken link is left.

    A broken link may be the fault of either machine, and the job cannot run over it. The machine with the most broken
    links gets the finding. If two machines have equally many, the later machine in the job's order gets it, because the
    first machine has the rendezvous store.
    """
    left: dict[str, dict[int, BadLink]] = {tested.machine: {} for tested in diagnosis.machines}
    for number, link in enumerate(diagnosis.links):
        for name in link.machines:
            left.setdefault(name, {})[number] = link
    most = [(-len(own), -position, machine) for position, (machine, own) in enumerate(left.items())]
    heapify(most)
    findings = []
    while most:
        count, position, machine = heappop(most)
        own = left[machine]
        if len(own) < -count:  # other machines got the findings of some of its links
            heappush(most, (-len(own), position, machine))
            continue
        for number, link in own.items():
            other = next(name for name in link.machines if name != machine)
            text = f"the link between it and {other} does not work, and both work with others"
            findings.append((machine, reasons.BAD_LINK.finding(link.test, other, link.text, text=text)))
            del left[other][number]
    return findings
