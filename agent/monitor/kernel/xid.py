"""What NVIDIA's drivers report by number: Xid of a GPU, SXid of an NVSwitch.

The table is data. Where it is from: NVIDIA's Xid catalogue of 2025-10 (its immediate action), what DCGM 4.6 counts as
devastating, and what NVIDIA's Kubernetes device plugin takes for an application's error. Where they differ, the
comment says what was chosen. An Xid 63 or 94 does not make the machine useless by itself: the catalogue says to go on
until the next reset, and to restart the application.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from everstep.model.health import Health, Remedy
from everstep.model.owner import Owner
from everstep.model.reason import Reason

CATALOGUE = "NVIDIA Xid catalogue, 2025-10"


class XidKind(Enum):
    """Who causes an Xid, and how bad it is: owner, verdict, and whether it names the machine with confidence."""

    BROKEN = (Owner.MACHINE, Health.FAULTY, True)
    """The GPU is of no use as it is."""
    CONTAINED = (Owner.MACHINE, Health.FAULTY, False)
    """The damage is one process's; the memory is bad."""
    SOFT = (Owner.MACHINE, Health.UNKNOWN, False)
    """Something to do when the job stops, or that counts when it comes often."""
    APPLICATION = (Owner.CODE, Health.UNKNOWN, False)
    """The program on the GPU does this, unless it comes again on the same GPU with other programs."""
    UNCLEAR = (Owner.UNKNOWN, Health.UNKNOWN, False)
    """The program or the GPU; or it follows from another fault, or from the end of a process. Alone it says nothing."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One number."""

    code: int
    means: str
    kind: XidKind
    remedy: Remedy
    source: str = CATALOGUE

    @property
    def reason(self) -> Reason:
        """What is found when the driver reports it."""
        owner, verdict, sure = self.kind.value
        means = f"Xid {self.code}, {self.means}"
        return Reason(f"xid-{self.code}", means, owner, self.remedy, verdict, sure, self.source)


def _several(codes: tuple[int, ...], means: str, kind: XidKind, remedy: Remedy, source: str = CATALOGUE) -> list[Xid]:
    return [Xid(code, means, kind, remedy, source) for code in codes]


_K, _A = XidKind, Remedy
PLUGIN = "NVIDIA's Kubernetes device plugin counts it as the application's"
OURS = "the catalogue of 2025-10 has no entry"

TABLE: tuple[Xid, ...] = (
    *_several((8, 11, 25, 32, 69, 80), "a channel or push buffer failed", _K.APPLICATION, _A.CHECK_CODE),
    Xid(13, "the program on the GPU raised an exception", _K.APPLICATION, _A.CHECK_CODE),
    Xid(31, "the program accessed memory of the GPU that it does not have", _K.APPLICATION, _A.CHECK_CODE),
    Xid(43, "a channel of the program stopped", _K.APPLICATION, _A.CHECK_CODE),
    Xid(45, "a program's work was removed from the GPU", _K.UNCLEAR, _A.NOTHING),
    *_several((38, 44), "the driver reported an internal error", _K.UNCLEAR, _A.WATCH),
    *_several((37, 66, 67, 93, 121, 137, 141), "the driver reported a condition to note", _K.SOFT, _A.WATCH),
    *_several(
        (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
        "a copy engine failed",
        _K.UNCLEAR,
        _A.RESTART_JOB,
    ),
    *_several(
        (68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139),
        "a media engine failed",
        _K.APPLICATION,
        _A.RESTART_JOB,
        PLUGIN,
    ),
    Xid(46, "the GPU stopped processing", _K.BROKEN, _A.RESET_GPU),
    Xid(48, "uncorrectable memory error (double bit)", _K.BROKEN, _A.RESET_GPU),
    Xid(54, "auxiliary power is not connected", _K.BROKEN, _A.REPLACE),
    Xid(62, "the power management processor halted", _K.BROKEN, _A.RESET_GPU),
    Xid(63, "a memory row will be remapped at the next reset", _K.SOFT, _A.RESET_GPU),
    Xid(64, "a memory row could not be remapped", _K.BROKEN, _A.RESET_GPU),
    Xid(74, "NVLink error", _K.BROKEN, _A.RESET_GPU),
    Xid(78, "the virtual GPU did not start", _K.BROKEN, _A.REPLACE),
    Xid(79, "the GPU has fallen off the bus", _K.BROKEN, _A.REBOOT),
    Xid(92, "many single-bit memory errors", _K.SOFT, _A.WATCH),
    Xid(94, "uncorrectable memory error, contained in one process", _K.CONTAINED, _A.RESTART_JOB),
    Xid(95, "uncorrectable memory error, not contained", _K.BROKEN, _A.RESET_GPU),
    # The catalogue says to reset; the device plugin takes it for the application's.
    Xid(109, "context switch timed out", _K.UNCLEAR, _A.RESET_GPU),
    Xid(110, "security fault", _K.BROKEN, _A.RESET_GPU),
    Xid(119, "the GPU's system processor did not answer in time", _K.BROKEN, _A.RESET_GPU),
    Xid(120, "the GPU's system processor failed", _K.BROKEN, _A.RESET_GPU),
    Xid(136, "link training failed", _K.BROKEN, _A.RESET_GPU),
    Xid(140, "unrecovered memory error", _K.BROKEN, _A.RESET_GPU),
    Xid(143, "the GPU could not be initialised", _K.BROKEN, _A.RESET_GPU),
    # Of NVLink 5 the line says whether it was fatal: see ``xid_of``.
    *_several(tuple(range(144, 151)), "NVLink error that was not fatal", _K.SOFT, _A.WATCH),
    Xid(151, "key rotation failed", _K.BROKEN, _A.REBOOT),
    # It names the action that another fault asks for: see ``xid_of``.
    Xid(154, "the driver asks for no recovery any more", _K.UNCLEAR, _A.NOTHING),
    Xid(155, "NVLink failed as the software defines it", _K.BROKEN, _A.RESET_GPU),
    Xid(156, "a resource of the GPU was retired", _K.BROKEN, _A.RESET_GPU),
    Xid(157, "a resource of the GPU could not be retired", _K.SOFT, _A.WATCH),
    Xid(158, "fatal timeout of the GPU", _K.BROKEN, _A.RESET_GPU),
    Xid(160, "a memory channel was retired", _K.SOFT, _A.RESET_GPU),
    Xid(161, "a memory channel could not be retired", _K.SOFT, _A.WATCH),
    *_several((162, 163, 164, 165), "power smoothing reports a condition", _K.SOFT, _A.WATCH, OURS),
    Xid(167, "fatal timeout of PCIe", _K.BROKEN, _A.REBOOT, OURS),
    Xid(168, "the GPU has less memory", _K.SOFT, _A.WATCH, OURS),
    Xid(169, "a security processor halted", _K.BROKEN, _A.RESET_GPU, OURS),
    *_several((171, 172), "uncorrectable memory error", _K.BROKEN, _A.RESET_GPU, OURS),
)
BY_CODE = {xid.code: xid for xid in TABLE}

UNLISTED = Reason(
    "xid-unlisted",
    "an Xid that this release does not know",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)
NVLINK_FATAL = Reason(
    "xid-nvlink-fatal", "fatal NVLink error", Owner.MACHINE, Remedy.RESET_GPU, Health.FAULTY, True, CATALOGUE
)
RECOVERY_ACTION = Reason(
    "xid-154-action",
    "Xid 154, the driver asks for a recovery",
    Owner.MACHINE,
    Remedy.RESET_GPU,
    Health.FAULTY,
    True,
    CATALOGUE,
)
SXID_FATAL = Reason(
    "sxid-fatal", "fatal error of an NVSwitch", Owner.MACHINE, Remedy.REBOOT, Health.FAULTY, True, CATALOGUE
)
SXID = Reason("sxid", "error of an NVSwitch that was not fatal", Owner.MACHINE, Remedy.WATCH, Health.UNKNOWN)

NVLINK5 = range(144, 151)
NO_ACTION = "(None)"


def xid_of(code: int, rest: str) -> Reason:
    """What an Xid says.

    Args:
        code: Its number.
        rest: What the driver wrote after it.
    """
    if code in NVLINK5 and "Nonfatal" not in rest and "Fatal" in rest:
        return NVLINK_FATAL
    if code == 154 and " to " in rest and NO_ACTION not in rest.rpartition(" to ")[2]:
        return RECOVERY_ACTION
    known = BY_CODE.get(code)
    return known.reason if known else UNLISTED


REASONS = (*(xid.reason for xid in TABLE), UNLISTED, NVLINK_FATAL, RECOVERY_ACTION, SXID_FATAL, SXID)
