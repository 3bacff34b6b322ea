"""The table of Xids agrees with NVIDIA's sources and with the code that uses it."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.classify.first_cause import classify_end
from everstep.model.finding import Health, Owner
from everstep.model.xid import REASONS, TABLE, xid_of

CHANGED = "GPU recovery action changed from 0x0 (None) to"
LINK_6 = "NVLink: fatal error detected on link 6"
RESTS = {f"{xid.codes[0]}{xid.suffix}": xid.example or "text" for xid in TABLE}


def test_every_reason_code_is_listed_once() -> None:
    codes = [reason.code for reason in REASONS]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("rest", RESTS.values(), ids=RESTS)
def test_the_classifier_of_logs_names_the_same_owner_for_every_xid(rest: str) -> None:
    def classified(code: int) -> Owner:
        return classify_end("", f"NVRM: Xid (PCI:0000:05:00): {code}, {rest}", None).owner

    assert {code: classified(code) for code in range(1, 201)} == {
        code: xid_of(code, rest).owner for code in range(1, 201)
    }


def test_every_row_of_the_table_can_be_reported() -> None:
    for xid in TABLE:
        assert [xid_of(code, xid.example or "text").code for code in xid.codes] == [
            f"xid-{code}{xid.suffix}" for code in xid.codes
        ]


# The Xids of these three tests come from NVIDIA's sources: DCGM 4.6 lists devastating Xids, the Kubernetes plugin lists
# Xids of applications, and the catalogue lists Xids that can be ignored or need a restart of the application.
@pytest.mark.parametrize("code", [48, 74, 79, 95, 119, 120, 140])
def test_a_devastating_xid_names_the_machine(code: int) -> None:
    reason = xid_of(code)
    assert (reason.owner, reason.verdict, reason.sure) == (Owner.MACHINE, Health.FAULTY, True)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109, 63, 94, 137, 154, 155, 156, 167, 171, 1, 999])
def test_other_xids_are_no_sure_fault(code: int) -> None:
    assert not xid_of(code).sure


@pytest.mark.parametrize("code", [13, 31, 43, 45, 137, 173, 999])
def test_an_xid_of_a_program_is_no_fault_of_the_machine(code: int) -> None:
    assert xid_of(code).verdict is Health.UNKNOWN


@pytest.mark.parametrize(
    ("code", "rest", "expected"),
    [
        (149, RESTS["149-fatal"], "xid-149-fatal"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x000525c6 0x00000000)", "xid-149-fatal-unclear"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 09", "xid-149-fatal-unclear"),
        (149, "NETIR_LINK_DOWN Nonfatal XC1 i2 Link 17 (0x025525c6 0x00000000)", "xid-149"),
        (149, "NETIR_MFDE_EVENT Fatal XC0 i0 Link 09 (0x00050646 0x00000001)", "xid-149-fatal"),
        (145, "pid=876766, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 i0 Link 12 (0x040980c2)", "xid-145"),
        (74, f"{LINK_6}(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "xid-74"),
        (74, f"{LINK_6}(0x100001, 0x0, 0x1, 0x0, 0x0, 0x0, 0x0)", "xid-74"),
        (74, f"{LINK_6}(0x1, 0x2, 0x0, 0x0, 0x0, 0x0, 0x0)", "xid-74"),
        (74, f"{LINK_6}(0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "xid-74"),
        (74, LINK_6, "xid-74"),
        (154, RESTS["154"], "xid-154"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", "xid-154-action"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", "xid-154-reboot"),
        (154, f"{CHANGED} 0x3", "xid-154-drain-p2p"),
        (154, f"{CHANGED} 0x9 (Something New)", "xid-154-other"),
        (173, "", "xid-unlisted"),
    ],
)
def test_the_rest_of_the_line_decides_for_some_xids(code: int, rest: str, expected: str) -> None:
    assert xid_of(code, rest).code == expected


@pytest.mark.parametrize("suffix", ["-action", "-reboot", "-bus-reset", "-system-reboot"])
def test_a_reset_or_a_reboot_that_the_driver_asks_for_names_the_machine(suffix: str) -> None:
    assert xid_of(154, RESTS[f"154{suffix}"]).sure


@pytest.mark.parametrize(
    ("code", "suffix"),
    [(149, "-peer"), (149, "-software"), (149, "-host"), (74, "-follows"), (74, "-ignored"), (154, "-other")],
)
def test_an_event_of_another_device_or_of_software_is_no_fault_of_the_machine(code: int, suffix: str) -> None:
    assert xid_of(code, RESTS[f"{code}{suffix}"]).verdict is Health.UNKNOWN


@pytest.mark.parametrize(
    ("code", "suffix"), [(154, "-drain-p2p"), (154, "-drain-and-reset"), (149, "-fatal-unclear"), (74, "-repeats")]
)
def test_a_gpu_that_still_works_in_part_is_a_fault_that_a_test_confirms(code: int, suffix: str) -> None:
    reason = xid_of(code, RESTS[f"{code}{suffix}"])
    assert (reason.owner, reason.verdict, reason.sure) == (Owner.MACHINE, Health.FAULTY, False)


@pytest.mark.parametrize(("earlier", "owner"), [(31, Owner.CODE), (48, Owner.MACHINE), (109, Owner.UNKNOWN)])
def test_xid_45_has_the_owner_of_the_xid_that_caused_it(earlier: int, owner: Owner) -> None:
    line = f"NVRM: Xid (PCI:0000:05:00): 45, pid=4242, name=python, Ch 00000010 caused by previous Xid {earlier}"
    assert classify_end("", line, None).owner is owner
    assert xid_of(45, line).verdict is Health.UNKNOWN


def test_an_sxid_that_can_be_ignored_is_not_fatal_for_the_classifier_either() -> None:
    def reason(sxid: str) -> str:
        return classify_end("", f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): {sxid}, Fatal, Link 40", None).reason

    assert [reason("20034"), reason("22013"), reason("20034")] == ["sxid-fatal", "xid-soft", "sxid-fatal"]
