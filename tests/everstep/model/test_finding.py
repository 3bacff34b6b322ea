"""Findings, and the verdict of a machine that follows from them."""

from __future__ import annotations

import pytest

from everstep.model.finding import Finding, Health, MachineFinding, verdict_of, worst_first


def finding(reason: str = "r", **fields: object) -> Finding:
    return Finding.model_validate({"inspection": "i", "reason": reason} | fields)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], Health.HEALTHY),
        ([Health.HEALTHY], Health.HEALTHY),
        ([Health.UNKNOWN, Health.HEALTHY], Health.UNKNOWN),
        ([Health.UNKNOWN, Health.FAULTY], Health.FAULTY),
        ([Health("of a later release")], Health.UNKNOWN),
    ],
)
def test_one_fault_makes_a_machine_faulty_and_what_is_not_known_unknown(
    verdicts: list[Health], expected: Health
) -> None:
    assert verdict_of(finding(verdict=verdict) for verdict in verdicts) is expected


def test_the_worst_come_first() -> None:
    found = [
        finding("unknown", verdict=Health.UNKNOWN, since_ns=1),
        finding("later", since_ns=9),
        finding("earlier", since_ns=2),
        finding("sure", since_ns=10, sure=True),
    ]
    assert [seen.reason for seen in worst_first(found)] == ["sure", "earlier", "later", "unknown"]


def test_words_of_a_later_release_are_kept() -> None:
    stored = {"inspection": "i", "reason": "r", "verdict": "odd", "owner": "moon", "remedy": "wait", "colour": "red"}
    read = Finding.model_validate(stored)
    assert (read.verdict, read.owner, read.remedy) == ("odd", "moon", "wait")
    assert read.model_dump(mode="json").items() >= stored.items()


def test_a_headline_names_machine_part_and_reason() -> None:
    found = MachineFinding(machine="m3", finding=finding("disk-full", item="/data", text="the file system is full"))
    assert found.headline == "m3: /data: the file system is full (disk-full)"
    assert MachineFinding(machine="m3", finding=finding("odd")).headline == "m3: odd (odd)"
