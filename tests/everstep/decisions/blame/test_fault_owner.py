"""Whose matter an incident was."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.first_failure import fault_owner
from everstep.model.evidence import Classification
from everstep.model.finding import Finding, Health, MachineFinding, Owner


def classified(owner: Owner, *, consequence: bool = False) -> Classification:
    return Classification(fault="x", owner=owner, reason="x", consequence=consequence)


def found(owner: Owner, verdict: Health = Health.FAULTY) -> MachineFinding:
    return MachineFinding(machine="m1", finding=Finding(inspection="x", reason="x", owner=owner, verdict=verdict))


@pytest.mark.parametrize(
    ("classification", "findings", "owner"),
    [
        (classified(Owner.CODE), [found(Owner.MACHINE)], Owner.CODE),
        (classified(Owner.NETWORK, consequence=True), [found(Owner.MACHINE)], Owner.MACHINE),
        (classified(Owner.NETWORK, consequence=True), [], Owner.UNKNOWN),
        (classified(Owner.UNKNOWN), [found(Owner.UNKNOWN), found(Owner.STORAGE)], Owner.STORAGE),
        (None, [found(Owner.MACHINE, Health.UNKNOWN)], Owner.UNKNOWN),
        (None, [], Owner.UNKNOWN),
    ],
)
def test_the_owner(classification: Classification | None, findings: list[MachineFinding], owner: Owner) -> None:
    assert fault_owner(classification, findings) is owner
