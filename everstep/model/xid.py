"""The meanings of the error numbers of NVIDIA's drivers: the Xid of a GPU and the SXid of an NVSwitch.

The inspection of the kernel log and the classifier of logs both use this table. Its sources are NVIDIA's Xid catalogue
of 2025-10 (immediate and investigatory action), the errors that DCGM 4.6 counts as devastating, and those that NVIDIA's
Kubernetes device plugin blames on the application. Where they contradict each other, the owner is unknown, or a comment
states the choice. After an Xid 63 or 94 the machine is still usable: the catalogue recommends to continue until the
next reset, and to restart the application.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from everstep.model.finding import Health, Owner, Reason, Remedy

CATALOGUE = "NVIDIA Xid catalogue, 2025-10"
PLUGIN = "NVIDIA's Kubernetes device plugin counts it as the application's"
NO_ENTRY = "the catalogue of 2025-10 has no entry"


class XidKind(Enum):
    """The kinds of causes of an Xid. The classifier has one rule for each kind, named by the value's first part."""

    OFF_THE_BUS = ("xid-off-the-bus", Owner.MACHINE, Health.FAULTY, True)
    """The GPU does not answer on PCIe."""
    MEMORY = ("xid-memory", Owner.MACHINE, Health.FAULTY, True)
    """Memory of the GPU has an error that was not corrected, or a row that cannot be remapped."""
    CONTAINED = ("xid-contained-memory", Owner.MACHINE, Health.FAULTY, False)
    """Memory of the GPU is bad, and only one process was damaged."""
    PEER = ("xid-peer", Owner.NETWORK, Health.UNKNOWN, False)
    """The device at the other end of an NVLink failed: another GPU or a switch, not the GPU that reports it."""
    LINK = ("xid-link", Owner.MACHINE, Health.FAULTY, True)
    """NVLink failed."""
    BROKEN = ("xid-gpu-broken", Owner.MACHINE, Health.FAULTY, True)
    """The GPU is of no use before it is reset, rebooted or replaced."""
    PROGRAM = ("xid-of-the-program", Owner.CODE, Health.UNKNOWN, False)
    """The program on the GPU causes it, unless it recurs on the same GPU with other programs."""
    FOLLOWS = ("xid-follows", Owner.UNKNOWN, Health.UNKNOWN, False)
    """It follows from another event or from the end of a process, and means nothing alone."""
    SOFT = ("xid-soft", Owner.MACHINE, Health.UNKNOWN, False)
    """A condition of the machine that needs an action once the job stops, or that matters only if it is frequent."""
    UNCLEAR = ("xid-unclear", Owner.UNKNOWN, Health.UNKNOWN, False)
    """The program, the driver or the GPU may cause it."""

    def __init__(self, code: str, owner: Owner, verdict: Health, sure: bool) -> None:
        self.code = code
        self.owner = owner
        self.verdict = verdict
        self.sure = sure


@dataclass(frozen=True, slots=True)
class Xid:
    """One meaning, and the numbers with this meaning."""

    codes: tuple[int, ...]
    means: str
    kind: XidKind
    remedy: Remedy
    source: str = CATALOGUE
    rest: str = ""
    """Case-insensitive regular expression: the row holds only for lines that match it after the number."""
    suffix: str = ""
    """Appended to the reason code, to distinguish it from that of another row with the same number."""

    def reason(self, code: int) -> Reason:
        """The reason that an inspection reports when the driver writes this number."""
        kind, means = self.kind, f"Xid {code}, {self.means}"
        return Reason(f"xid-{code}{self.suffix}", means, kind.owner, self.remedy, kind.verdict, kind.sure, self.source)


_K, _A = XidKind, Remedy
_NVLINK5 = tuple(range(144, 151))
RECOVERY = r" to (?!.*\(None\))"
"""Matches a line in which the driver asks for a recovery action."""
# Of an Xid 149, bits 20 to 25 of the first number in parentheses state why the link went down.
_LINK_EVENT = r"NETIR_LINK_(?:EVT|DOWN)\b.*\(0x[0-9a-f]"
PEER_DOWN = _LINK_EVENT + r"(?:[26ae][0-5]|[159d]5)[0-9a-f]{5}\b"
"""Matches a link event whose reason is at the other end of the link: 21 and 32 to 37."""
HOST_DOWN = _LINK_EVENT + r"[26ae][68][0-9a-f]{5}\b"
"""Matches a link event for which the catalogue recommends no action on the GPU: 38 and 40."""
# An Xid 74 ends with seven registers. Of the first four that count, these bits report no fault of the link itself.
_HARMLESS_1 = "0x(?:40[0189]0000|[189]0000)?[0-3]"
_HARMLESS_4_5 = "0x(?:[1-3]0000|0), 0x(?:(?:2[04]|4)?[0189]00000|0)"
LINK_SECONDARY = rf"link \d+ ?\({_HARMLESS_1}, 0x[0-9a-f]+, 0x0, {_HARMLESS_4_5}\b"
"""Matches an NVLink error that follows from another error, or that can be ignored."""
LINK_REPEATED = rf"link \d+ ?\({_HARMLESS_1}, 0x[0-9a-f]+, 0x[1-9a-f]0000, {_HARMLESS_4_5}\b"
"""Matches an NVLink error that means something only if it recurs."""

TABLE: tuple[Xid, ...] = (
    # Rows with ``rest`` come before the rows of the same numbers without it.
    Xid((149,), "the other end of an NVLink went down", _K.PEER, _A.RESET_GPU, rest=PEER_DOWN, suffix="-peer"),
    Xid((149,), "an NVLink went down for another reason", _K.FOLLOWS, _A.WATCH, rest=HOST_DOWN, suffix="-host"),
    Xid(_NVLINK5, "fatal NVLink error", _K.LINK, _A.RESET_GPU, rest=r"(?<!Non)(?<!Non-)Fatal", suffix="-fatal"),
    Xid((154,), "the driver asks to drain peers", _K.SOFT, _A.RESTART_JOB, rest=r" to .*\(Drain P2P\)", suffix="-drain"),
    Xid((154,), "the driver asks for a reboot", _K.BROKEN, _A.REBOOT, rest=r" to .*Reboot", suffix="-reboot"),
    Xid((74,), "NVLink error after another one", _K.FOLLOWS, _A.NOTHING, rest=LINK_SECONDARY, suffix="-secondary"),
    Xid((74,), "NVLink error that may recur", _K.SOFT, _A.WATCH, rest=LINK_REPEATED, suffix="-repeated"),
    Xid((154,), "the driver asks for a recovery", _K.BROKEN, _A.RESET_GPU, rest=RECOVERY, suffix="-action"),
    Xid((8, 11, 25, 32, 69, 80), "a channel or push buffer failed", _K.PROGRAM, _A.CHECK_CODE),
    Xid((13,), "the program on the GPU raised an exception", _K.PROGRAM, _A.CHECK_CODE),
    Xid((31,), "the program accessed memory of the GPU that it does not have", _K.PROGRAM, _A.CHECK_CODE),
    Xid((43,), "a channel of the program stopped", _K.PROGRAM, _A.CHECK_CODE),
    Xid((68,), "a video decoder failed", _K.PROGRAM, _A.RESTART_JOB, PLUGIN),
    Xid((45,), "a program's work was removed from the GPU", _K.FOLLOWS, _A.NOTHING),
    Xid((154,), "the driver asks for no recovery any more", _K.FOLLOWS, _A.NOTHING),
    # The catalogue says to ignore these, and to look at the program (37), the software (66) or the privileges (137).
    Xid((14, 37, 38, 44, 66, 67, 106, 107, 108, 137, 141, 152, 153, 166, 170), "the driver reported a condition to note", _K.UNCLEAR, _A.WATCH),
    Xid((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "a copy engine failed", _K.UNCLEAR, _A.RESTART_JOB),
    Xid((60, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142), "a media engine failed", _K.UNCLEAR, _A.RESTART_JOB),
    # The catalogue says to reset the GPU; the device plugin counts it as the application's.
    Xid((109,), "context switch timed out", _K.UNCLEAR, _A.RESET_GPU, f"{CATALOGUE}; {PLUGIN}"),
    Xid((159,), "a transaction on the link to the processor failed", _K.UNCLEAR, _A.WATCH),
    Xid((46,), "the GPU stopped processing", _K.BROKEN, _A.RESET_GPU),
    Xid((54,), "auxiliary power is not connected", _K.BROKEN, _A.REPLACE),
    Xid((62,), "the power management processor halted", _K.BROKEN, _A.RESET_GPU),
    Xid((110,), "security fault", _K.BROKEN, _A.RESET_GPU),
    Xid((119,), "the GPU's system processor did not answer in time", _K.BROKEN, _A.RESET_GPU),
    Xid((120,), "the GPU's system processor failed", _K.BROKEN, _A.RESET_GPU),
    Xid((143,), "the GPU could not be initialised", _K.BROKEN, _A.RESET_GPU),
    Xid((151,), "key rotation failed", _K.BROKEN, _A.REBOOT),
    Xid((156,), "a resource of the GPU was retired", _K.BROKEN, _A.RESET_GPU),
    Xid((158,), "fatal timeout of the GPU", _K.BROKEN, _A.RESET_GPU),
    Xid((169,), "a security processor halted", _K.BROKEN, _A.RESET_GPU, NO_ENTRY),
    Xid((79,), "the GPU has fallen off the bus", _K.OFF_THE_BUS, _A.REBOOT),
    Xid((167,), "fatal timeout of PCIe", _K.OFF_THE_BUS, _A.REBOOT, NO_ENTRY),
    Xid((48,), "uncorrectable memory error (double bit)", _K.MEMORY, _A.RESET_GPU),
    Xid((64,), "a memory row could not be remapped", _K.MEMORY, _A.RESET_GPU),
    Xid((95,), "uncorrectable memory error, not contained", _K.MEMORY, _A.RESET_GPU),
    Xid((140,), "unrecovered memory error", _K.MEMORY, _A.RESET_GPU),
    Xid((171, 172), "uncorrectable memory error", _K.MEMORY, _A.RESET_GPU, NO_ENTRY),
    Xid((94,), "uncorrectable memory error, contained in one process", _K.CONTAINED, _A.RESTART_JOB),
    Xid((74,), "NVLink error", _K.LINK, _A.RESET_GPU),
    Xid((136,), "link training failed", _K.LINK, _A.RESET_GPU),
    Xid((155,), "NVLink failed as the software defines it", _K.LINK, _A.RESET_GPU),
    Xid((63,), "a memory row will be remapped at the next reset", _K.SOFT, _A.RESET_GPU),
    # The catalogue says to update software and firmware, and DCGM only warns.
    Xid((78,), "the virtual GPU did not start", _K.SOFT, _A.WATCH),
    Xid((92,), "many single-bit memory errors", _K.SOFT, _A.WATCH),
    Xid((93,), "the InfoROM of the GPU wears out", _K.SOFT, _A.WATCH),
    Xid((121,), "error of the link between chips (C2C)", _K.SOFT, _A.WATCH),
    Xid(_NVLINK5, "NVLink error that was not fatal", _K.SOFT, _A.WATCH),
    Xid((157,), "a resource of the GPU could not be retired", _K.SOFT, _A.WATCH),
    Xid((160,), "a memory channel was retired", _K.SOFT, _A.RESET_GPU),
    Xid((161,), "a memory channel could not be retired", _K.SOFT, _A.WATCH),
    Xid((162, 163, 164, 165), "power smoothing reports a condition", _K.SOFT, _A.WATCH, NO_ENTRY),
    Xid((168,), "the GPU has less memory", _K.SOFT, _A.WATCH, NO_ENTRY),
)
UNLISTED = Reason("xid-unlisted", "an Xid that this release does not know", Owner.UNKNOWN, Remedy.WATCH, Health.UNKNOWN)
SXID_FATAL = Reason(
    "sxid-fatal", "fatal error of an NVSwitch", Owner.MACHINE, Remedy.REBOOT, Health.FAULTY, True, CATALOGUE
)
SXID = Reason("sxid", "error of an NVSwitch that was not fatal", Owner.MACHINE, Remedy.WATCH, Health.UNKNOWN)
REASONS: tuple[Reason, ...] = (
    *(xid.reason(code) for xid in TABLE for code in xid.codes),
    *(UNLISTED, SXID_FATAL, SXID),
)
"""All reasons that such numbers can give."""


def xid_of(code: int, rest: str = "") -> Reason:
    """The reason that an Xid gives.

    Args:
        code: Number of the Xid.
        rest: The text that the driver wrote after the number.
    """
    for xid in TABLE:
        if code in xid.codes and re.search(xid.rest, rest, re.IGNORECASE):
            return xid.reason(code)
    return UNLISTED


def pattern_of(kind: XidKind) -> str:
    """A case-insensitive regular expression for the lines of a kind."""
    return rf"\bXid \([^)]*\): (?:{'|'.join(_row_pattern(at) for at, xid in enumerate(TABLE) if xid.kind is kind)})"


def _row_pattern(at: int) -> str:
    """The pattern of a row, without the lines that an earlier row of another kind matches."""
    row = TABLE[at]
    earlier = (xid for xid in TABLE[:at] if xid.kind is not row.kind and set(xid.codes) & set(row.codes))
    others = "".join(f"(?!{_numbers(xid)})" for xid in earlier)
    return others + _numbers(row)


def _numbers(xid: Xid) -> str:
    return rf"(?:{'|'.join(map(str, xid.codes))})\b" + (f".*{xid.rest}" if xid.rest else "")
