"""Faults by which an inspection names a machine for sure, and what shows each of them. Data.

What needs hardware that refuses to answer, and cannot be shown here: ``gpu-power`` and ``gpu-driver-hangs``, which are
sure only in their gravest form. ``fs-readonly`` is a drill of its own.
"""

from __future__ import annotations

from agent.monitor.kernel import rules
from everstep.model import xid
from everstep.model.finding import Reason

GPU = "{gpu}"
"""In a line: the place of a GPU on PCI."""
FALLEN_OFF = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


REST = {
    "": "injected",
    "-fatal": "RLW_CTRL Fatal XC0 i0 Link 07",
    "-action": "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
}
"""Suffix of an Xid's reason code → what the driver writes after the number."""


def xid_line(code: int, suffix: str = "") -> str:
    """What the driver writes about an Xid."""
    return f"NVRM: Xid (PCI:{GPU}): {code}, {FALLEN_OFF if code == 79 else REST[suffix]}"


LINES: dict[str, str] = {
    **{rule.reason.code: rule.examples[0] for rule in rules.RULES if rule.reason.sure},
    **{
        f"xid-{code}{row.suffix}": xid_line(code, row.suffix)
        for row in xid.TABLE
        if row.kind.sure
        for code in row.codes
    },
    xid.SXID_FATAL.code: f"nvidia-nvswitch3: SXid (PCI:{GPU}): 20034, Fatal, Link 30 LTSSM Fault Up",
}
"""Reason code → a line of the kernel log."""
FAKE_GPUS: dict[str, dict[str, object]] = {
    "gpu-lost": {"lost": True},
    "gpu-reset-required": {"reset_required": True},
    "gpu-count": {"missing": True},
    "gpu-recovery-action": {"recovery_action": 2},
    "gpu-row-remap-failed": {"remap_failed": True},
}
"""Reason code → what is wrong with a fake GPU (``agent.monitor.gpu.fake``)."""
SURE: tuple[str, ...] = (*LINES, *FAKE_GPUS)
"""Reason codes that a drill can show."""


def reason_of(code: str) -> Reason | None:
    """What the kernel log says by such a line; None: it is no reason of the kernel log."""
    known = (*(rule.reason for rule in rules.RULES), *xid.REASONS)
    return next((reason for reason in known if reason.code == code), None)
