"""The table of Xids agrees with NVIDIA's sources and with the code that uses it."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.classify.first_cause import classify_end
from everstep.model.finding import Health, Owner
from everstep.model.xid import REASONS, TABLE, xid_of

RESTS = {xid.suffix: "text" for xid in TABLE} | {
    "-fatal": "pid=1, name=python, RLW_CTRL Fatal XC0 i0 Link 07",
    "-action": "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
}


def test_every_reason_code_is_listed_once() -> None:
    codes = [reason.code for reason in REASONS]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("rest", RESTS.values(), ids=RESTS)
def test_the_classifier_of_logs_names_the_same_owner_for_every_number(rest: str) -> None:
    def classified(code: int) -> Owner:
        return classify_end("", f"NVRM: Xid (PCI:0000:05:00): {code}, {rest}", None).owner

    assert {code: classified(code) for code in range(1, 201)} == {
        code: xid_of(code, rest).owner for code in range(1, 201)
    }


def test_what_every_row_is_about_can_be_reported() -> None:
    for xid in TABLE:
        assert [xid_of(code, RESTS[xid.suffix]).code for code in xid.codes] == [
            f"xid-{code}{xid.suffix}" for code in xid.codes
        ]


# The Xids of these three tests come from NVIDIA's sources: DCGM 4.6 lists devastating Xids, the Kubernetes plugin lists
# Xids of applications, and the catalogue lists Xids that can be ignored or need a restart of the application.
@pytest.mark.parametrize("code", [48, 74, 79, 95, 119, 120, 140])
def test_what_is_devastating_names_the_machine(code: int) -> None:
    reason = xid_of(code)
    assert (reason.owner, reason.verdict, reason.sure) == (Owner.MACHINE, Health.FAULTY, True)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109, 63, 94, 154, 1, 999])
def test_what_is_not_names_no_machine_with_confidence(code: int) -> None:
    assert not xid_of(code).sure


@pytest.mark.parametrize("code", [13, 31, 43, 45, 999])
def test_what_a_program_causes_is_no_fault_of_the_machine(code: int) -> None:
    assert xid_of(code).verdict is Health.UNKNOWN


@pytest.mark.parametrize(
    ("code", "rest", "expected"),
    [
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000)", "xid-149-fatal"),
        (145, "pid=876766, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 i0 Link 12 (0x040980c2)", "xid-145"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "xid-154-action"),
        (154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)", "xid-154"),
    ],
)
def test_of_some_the_rest_of_the_line_decides(code: int, rest: str, expected: str) -> None:
    assert xid_of(code, rest).code == expected
