"""Defines the meanings of the error numbers of NVIDIA's drivers: the Xid of a GPU and the SXid of an NVSwitch.

The inspection of the kernel log and the classifier of logs both use this table, and the inspection of GPUs uses the
recovery actions. Its sources are NVIDIA's Xid catalogue (immediate and investigatory action, the decoding of Xid 74 and
of Xid 144 to 150), the errors that DCGM 4.6 counts as devastating, and those that NVIDIA's Kubernetes device plugin
blames on the application. Where they contradict each other, the owner is unknown, or a comment states the choice. After
an Xid 63 or 94 the machine is still usable: the catalogue recommends to continue until the next reset, and to restart
the application.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from everstep.model.finding import Health, Owner, Reason, Remedy

CATALOGUE = "NVIDIA Xid catalogue, docs.nvidia.com/deploy/xid-errors"
DECODED = f"{CATALOGUE}: decoding of Xid 144 to 150"
NVLINK_FLOW = f"{CATALOGUE}: WORKFLOW_NVLINK_ERR"
PLUGIN = "NVIDIA's Kubernetes device plugin counts it as the application's"
NO_ACTION = f"{CATALOGUE} names it, and no action"
FABRIC_MANAGER = "NVIDIA Fabric Manager user guide: SXid errors that are not fatal"


class XidKind(Enum):
    """The kinds of causes of an Xid. The classifier has one rule for each kind, named by the value's first part."""

    OFF_THE_BUS = ("xid-off-the-bus", Owner.MACHINE, Health.FAULTY, True)
    """The GPU does not answer on PCIe."""
    MEMORY = ("xid-memory", Owner.MACHINE, Health.FAULTY, True)
    """Memory of the GPU has an error that was not corrected, or a row that cannot be remapped."""
    CONTAINED = ("xid-contained-memory", Owner.MACHINE, Health.FAULTY, False)
    """Memory of the GPU is bad, and at most one process is known to be damaged."""
    LINK = ("xid-link", Owner.MACHINE, Health.FAULTY, True)
    """NVLink failed."""
    BROKEN = ("xid-gpu-broken", Owner.MACHINE, Health.FAULTY, True)
    """The GPU is of no use before it is reset, rebooted or replaced."""
    DEGRADED = ("xid-gpu-degraded", Owner.MACHINE, Health.FAULTY, False)
    """The GPU can do a part of its work until the job stops, or it is not clear which device failed."""
    PROGRAM = ("xid-of-the-program", Owner.CODE, Health.UNKNOWN, False)
    """The program on the GPU causes it, unless it recurs on the same GPU with other programs."""
    PEER = ("xid-link-peer", Owner.NETWORK, Health.UNKNOWN, False)
    """The device at the other end of an NVLink causes it: an NVSwitch, or a GPU of this machine or of another."""
    FOLLOWS = ("xid-follows", Owner.UNKNOWN, Health.UNKNOWN, False)
    """The Xid follows from another event or from the end of a process, and means nothing alone."""
    SOFT = ("xid-soft", Owner.MACHINE, Health.UNKNOWN, False)
    """A condition of the machine that needs an action once the job stops, or that matters only if it is frequent."""
    UNCLEAR = ("xid-unclear", Owner.UNKNOWN, Health.UNKNOWN, False)
    """The program, the driver, an operator or the GPU may cause it."""

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
    """Appended to the reason code, to distinguish it from the code of another row with the same number."""
    example: str = ""
    """A text after the number for which the row holds; empty: it holds for any text."""

    def reason(self, code: int) -> Reason:
        """The reason that an inspection reports when the driver writes this number."""
        kind, means = self.kind, f"Xid {code}, {self.means}"
        return Reason(f"xid-{code}{self.suffix}", means, kind.owner, self.remedy, kind.verdict, kind.sure, self.source)


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """A recovery that the driver asks for: by Xid 154 in the kernel log, and by a field of NVML."""

    number: int
    names: str
    """Regular expression for its names in the kernel log."""
    means: str
    kind: XidKind
    remedy: Remedy
    suffix: str
    """Suffix of the reason code of Xid 154."""
    name: str
    """One of the names."""

    @property
    def line(self) -> str:
        """Regular expression for the line of Xid 154 that asks for it; without a name the number decides."""
        return rf"\bto (?:0x0*{self.number:x}\b(?! ?\()|(?:0x[0-9a-f]+ )?\((?:{self.names})\))"


_K, _A = XidKind, Remedy
RECOVERY_ACTIONS: tuple[RecoveryAction, ...] = (
    RecoveryAction(
        1, "GPU Reset(?: Required)?|PF FLR", "reset the GPU", _K.BROKEN, _A.RESET_GPU, "-action", "GPU Reset Required"
    ),
    RecoveryAction(
        2,
        "Node Reboot(?: Required)?|OS Reboot",
        "reboot the machine",
        _K.BROKEN,
        _A.REBOOT,
        "-reboot",
        "Node Reboot Required",
    ),
    # Work that does not use the affected part may continue until the job stops, so these do not name the machine for
    # sure. When the GPU is drained, the driver asks for another action.
    RecoveryAction(
        3, "Drain P2P", "drain traffic between GPUs, then reset", _K.DEGRADED, _A.RESET_GPU, "-drain-p2p", "Drain P2P"
    ),
    RecoveryAction(
        4,
        "Drain and Reset",
        "drain, then reset the GPU",
        _K.DEGRADED,
        _A.RESET_GPU,
        "-drain-and-reset",
        "Drain and Reset",
    ),
    RecoveryAction(
        5, "Recover IMEX.*", "recover the IMEX domain", _K.DEGRADED, _A.CHECK_SETUP, "-imex", "Recover IMEX Domain"
    ),
    RecoveryAction(
        6, "(?:GPU )?Bus Reset.*|GPU Reset Bus.*", "reset the bus", _K.BROKEN, _A.REBOOT, "-bus-reset", "Bus Reset"
    ),
    RecoveryAction(7, "System Reboot.*", "reboot the system", _K.BROKEN, _A.REBOOT, "-system-reboot", "System Reboot"),
)
"""The actions by NVML's number (nvmlDeviceGpuRecoveryAction_t); 0 is none."""
NO_RECOVERY = r"\bto (?:0x0+\b(?! ?\()|(?:0x[0-9a-f]+ )?\(None\))"
"""Matches a line in which the driver asks for no recovery any more: the GPU was reset, or it recovered."""

_CHANGED, _RECOVERED = (
    "GPU recovery action changed from 0x0 (None) to",
    "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
)
_NVLINK5 = (144, 145, 146, 147, 148, 150)
_FATAL = r"(?<!Non)(?<!Non-)Fatal"
_NOT_FATAL = "NVLink error that was not fatal"


def _within(*bits: int) -> str:
    """A regular expression for a hexadecimal register with at most these bits."""
    mask = sum(1 << bit for bit in bits)
    digits = [
        "".join(f"{digit:x}" for digit in range(16) if not digit & ~(mask >> shift & 0xF)) for shift in range(0, 32, 4)
    ]
    pattern = f"[{digits[7]}]"
    for digit in reversed(digits[:7]):
        pattern = f"(?:{pattern})?[{digit}]"
    return f"0x{pattern}"


def _registers(first: str, third: str, fourth: str, fifth: str) -> str:
    """A regular expression for the seven registers of Xid 74, at least one of which is not zero."""
    zero = _within()
    registers = r",\s*".join((first, zero, third, fourth, fifth, zero, zero))
    return rf"\((?!(?:0x0+[,\s]*)+\)){registers}\)"


def _link_event(*subcodes: int) -> str:
    """A regular expression for a fatal link event of Xid 149 with one of these codes, bits 20 to 25 of its register."""
    high = ["".join(f"{digit:x}" for digit in range(16) if digit & 3 == bits) for bits in range(4)]
    codes = "|".join(f"[{high[code >> 4]}]{code & 15:x}" for code in subcodes)
    return rf"NETIR_LINK_(?:EVT|DOWN)\b.*{_FATAL}.*\(0x[0-9a-f](?:{codes})[0-9a-f]{{5}}\b"


_IGNORED, _SECONDARY, _REPEATED = (0, 23, 30), (1, 20), (27, 29)
_BELOW_A_FAULT = _within(20, 23, 26, 29)
_OTHER_END = (16, 17, 18)
_CODES_OF_PEER = (21, *range(32, 38))
_CODES_OF_SOFTWARE = (15, 16, 17, 18, 22, 38)
_CODES_OF_HARDWARE = (2, 4, 10, 42, 43)

TABLE: tuple[Xid, ...] = (
    # Rows with ``rest`` come before the rows of the same numbers without it.
    Xid(
        (149,),
        "the other end of an NVLink went down",
        _K.PEER,
        _A.WATCH,
        f"{DECODED}, INVESTIGATE_PEER_DEVICE",
        _link_event(*_CODES_OF_PEER),
        "-peer",
        "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000 0x00000000)",
    ),
    Xid(
        (149,),
        "software or an operator took an NVLink down",
        _K.UNCLEAR,
        _A.CHECK_SETUP,
        f"{DECODED}, INVESTIGATE_SW_USER",
        _link_event(*_CODES_OF_SOFTWARE),
        "-software",
        "NETIR_LINK_DOWN Fatal XC0 i0 Link 00 (0x016415c6 0x00000000)",
    ),
    Xid(
        (149,),
        "an NVLink went down because of another event on the host",
        _K.FOLLOWS,
        _A.WATCH,
        f"{DECODED}, INVESTIGATE_HOST",
        _link_event(40),
        "-host",
        "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x028415c6 0x00000000)",
    ),
    Xid(
        (149,),
        "fatal NVLink error of the link or the GPU",
        _K.LINK,
        _A.RESET_GPU,
        f"{DECODED}, INVESTIGATE_LINK_SI and NETIR_MFDE_EVENT",
        rf"{_link_event(*_CODES_OF_HARDWARE)}|NETIR_MFDE_EVENT.*{_FATAL}",
        "-fatal",
        "NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000)",
    ),
    Xid(
        (149,),
        "fatal NVLink error that does not name the device at fault",
        _K.DEGRADED,
        _A.RESET_GPU,
        f"{DECODED}, SYMPATHETIC_REPORT_SOLO",
        _FATAL,
        "-fatal-unclear",
        "NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x000525c6 0x00000000)",
    ),
    Xid(
        (145,),
        "fatal NVLink error that a wrong request may cause",
        _K.DEGRADED,
        _A.RESET_GPU,
        f"{DECODED}, RLW_RXPIPE",
        f"RLW_RXPIPE.*{_FATAL}",
        "-fatal-unclear",
        "RLW_RXPIPE Fatal XC0 i0 Link 07",
    ),
    Xid(
        _NVLINK5,
        "fatal NVLink error",
        _K.LINK,
        _A.RESET_GPU,
        DECODED,
        _FATAL,
        "-fatal",
        "RLW_CTRL Fatal XC0 i0 Link 07",
    ),
    Xid(
        (74,),
        "NVLink reports a condition that can be ignored",
        _K.SOFT,
        _A.NOTHING,
        NVLINK_FLOW,
        _registers(_within(*_IGNORED), _within(), _within(), _BELOW_A_FAULT),
        "-ignored",
        "NVLink: fatal error detected on link 6(0x40000001, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0)",
    ),
    Xid(
        (74,),
        "NVLink error that follows from another error",
        _K.FOLLOWS,
        _A.WATCH,
        NVLINK_FLOW,
        _registers(_within(*_IGNORED, *_SECONDARY), _within(), _within(*_OTHER_END), _BELOW_A_FAULT),
        "-follows",
        "NVLink: fatal error detected on link 6(0x100000, 0x0, 0x0, 0x20000, 0x0, 0x0, 0x0)",
    ),
    Xid(
        (74,),
        "NVLink error that shows a fault only if it is repeated",
        _K.DEGRADED,
        _A.WATCH,
        NVLINK_FLOW,
        _registers(
            _within(*_IGNORED, *_SECONDARY, *_REPEATED),
            _within(16, 17, 18, 19),
            _within(*_OTHER_END),
            _BELOW_A_FAULT,
        ),
        "-repeats",
        "NVLink: fatal error detected on link 6(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
    ),
    *(
        Xid(
            (154,),
            f"the driver asks to {each.means}",
            each.kind,
            each.remedy,
            CATALOGUE,
            each.line,
            each.suffix,
            f"{_CHANGED} {each.number:#x} ({each.name})",
        )
        for each in RECOVERY_ACTIONS
    ),
    Xid(
        (154,), "the driver asks for no recovery any more", _K.FOLLOWS, _A.NOTHING, rest=NO_RECOVERY, example=_RECOVERED
    ),
    Xid((8, 11, 25, 69, 80), "a channel or push buffer failed", _K.PROGRAM, _A.CHECK_CODE),
    Xid((13,), "the program on the GPU raised an exception", _K.PROGRAM, _A.CHECK_CODE),
    Xid((31,), "the program accessed memory of the GPU that it does not have", _K.PROGRAM, _A.CHECK_CODE),
    Xid((43,), "a channel of the program stopped", _K.PROGRAM, _A.CHECK_CODE),
    Xid((68,), "a video decoder failed", _K.PROGRAM, _A.RESTART_JOB, PLUGIN),
    # The catalogue has the same text for 137 as for 31: typically these are bugs of the application.
    Xid((108, 137), "the program accessed memory of another GPU that it does not have", _K.PROGRAM, _A.CHECK_CODE),
    Xid((45,), "a program's work was removed from the GPU", _K.FOLLOWS, _A.NOTHING),
    Xid((106, 107), "a test message", _K.FOLLOWS, _A.NOTHING),
    Xid((159,), "an access between processor and GPU failed", _K.FOLLOWS, _A.WATCH),
    # The catalogue says that PCIe causes it and not the application, and that the application is restarted and checked.
    Xid((32,), "a push buffer arrived damaged", _K.UNCLEAR, _A.RESTART_JOB),
    # The catalogue says to ignore these, and to look at the program (37) or the software (66).
    Xid((14, 37, 38, 44, 66, 67, 141, 152, 153), "the driver reported a condition to note", _K.UNCLEAR, _A.WATCH),
    Xid((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "a copy engine failed", _K.UNCLEAR, _A.RESTART_JOB),
    Xid((60, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142), "a media engine failed", _K.UNCLEAR, _A.RESTART_JOB),
    # The catalogue says to reset the GPU; the device plugin blames the application. A further Xid 154 decides.
    Xid((109,), "context switch timed out", _K.UNCLEAR, _A.RESET_GPU, f"{CATALOGUE}; {PLUGIN}"),
    Xid(
        (154,), "the driver asks for a recovery that this release does not know", _K.UNCLEAR, _A.WATCH, suffix="-other"
    ),
    # An operator or the fabric's software may take a link down on purpose.
    Xid((155,), "an NVLink went down as the software defines it", _K.UNCLEAR, _A.CHECK_SETUP),
    Xid((166, 170), "NVLink reports a condition of confidential computing", _K.UNCLEAR, _A.CHECK_SETUP, NO_ACTION),
    Xid((46,), "the GPU stopped processing", _K.BROKEN, _A.RESET_GPU),
    Xid((54,), "auxiliary power is not connected", _K.BROKEN, _A.REPLACE),
    Xid((62,), "the power management processor halted", _K.BROKEN, _A.RESET_GPU),
    Xid((110,), "security fault", _K.BROKEN, _A.RESET_GPU),
    Xid((119,), "the GPU's system processor did not answer in time", _K.BROKEN, _A.RESET_GPU),
    Xid((120,), "the GPU's system processor failed", _K.BROKEN, _A.RESET_GPU),
    Xid((143,), "the GPU could not be initialised", _K.BROKEN, _A.RESET_GPU),
    Xid((151,), "key rotation failed", _K.BROKEN, _A.REBOOT),
    Xid((158,), "fatal timeout of the GPU", _K.BROKEN, _A.RESET_GPU),
    Xid((167,), "fatal timeout of PCIe", _K.DEGRADED, _A.REBOOT, NO_ACTION),
    Xid((169,), "a security processor halted", _K.DEGRADED, _A.RESET_GPU, NO_ACTION),
    Xid((79,), "the GPU has fallen off the bus", _K.OFF_THE_BUS, _A.REBOOT),
    Xid((48,), "uncorrectable memory error (double bit)", _K.MEMORY, _A.RESET_GPU),
    Xid((64,), "a memory row could not be remapped", _K.MEMORY, _A.RESET_GPU),
    Xid((95,), "uncorrectable memory error, not contained", _K.MEMORY, _A.RESET_GPU),
    Xid((140,), "unrecovered memory error", _K.MEMORY, _A.RESET_GPU),
    Xid((94,), "uncorrectable memory error, contained in one process", _K.CONTAINED, _A.RESTART_JOB),
    # They come with Xid 48, 94 or 95, which say how far the error reached.
    Xid((171, 172), "where an uncorrectable memory error is: in DRAM (171), in SRAM (172)", _K.CONTAINED, _A.WATCH),
    Xid((74,), "NVLink error", _K.LINK, _A.RESET_GPU),
    Xid((136,), "link training failed", _K.LINK, _A.RESET_GPU),
    Xid((63,), "a memory row will be remapped at the next reset", _K.SOFT, _A.RESET_GPU),
    # The catalogue says to update software and firmware, and DCGM only warns.
    Xid((78,), "the virtual GPU did not start", _K.SOFT, _A.WATCH),
    Xid((92,), "many single-bit memory errors", _K.SOFT, _A.WATCH),
    Xid((93,), "the InfoROM of the GPU wears out", _K.SOFT, _A.WATCH),
    Xid((121,), "error of the link between chips (C2C)", _K.SOFT, _A.WATCH),
    Xid((*_NVLINK5, 149), _NOT_FATAL, _K.SOFT, _A.WATCH, DECODED),
    Xid((156,), "a part of the GPU will be retired at the next reset", _K.SOFT, _A.RESET_GPU),
    Xid((157,), "a resource of the GPU could not be retired", _K.SOFT, _A.WATCH),
    Xid((160,), "a memory channel was retired", _K.SOFT, _A.RESET_GPU),
    Xid((161,), "a memory channel could not be retired", _K.SOFT, _A.WATCH),
    Xid((162, 163, 164, 165), "power smoothing reports a condition", _K.SOFT, _A.WATCH, NO_ACTION),
    Xid((168,), "the GPU has less memory", _K.SOFT, _A.WATCH, NO_ACTION),
)
UNLISTED = Reason("xid-unlisted", "an Xid that this release does not know", Owner.UNKNOWN, Remedy.WATCH, Health.UNKNOWN)
SXID_FATAL = Reason(
    "sxid-fatal", "fatal error of an NVSwitch", Owner.MACHINE, Remedy.REBOOT, Health.FAULTY, True, CATALOGUE
)
SXID = Reason(
    "sxid",
    "error of an NVSwitch that was not fatal",
    Owner.MACHINE,
    Remedy.WATCH,
    Health.UNKNOWN,
    source=FABRIC_MANAGER,
)
SXID_NOT_FATAL = frozenset(
    {
        *(10001, 10002, 10004, 10005, 11004, 11012, 11021, 11022, 11023, 12021, 12023, 12028, 15008, 15011),
        *(19049, 19055, 19057, 19059, 19062, 19065, 19068, 19071, 20001, 20012, 22013, 24001, 24002, 24003),
    }
)
"""SXids that are not fatal according to NVIDIA's document. Some drivers call them fatal when a link is shut down on
purpose, e.g. because the fabric manager is restarted."""
SXID_LINE = rf"\bSXid \([^)]*\): (?!(?:{'|'.join(map(str, sorted(SXID_NOT_FATAL)))})\b)\d+, Fatal"
"""A case-insensitive regular expression for lines of a fatal SXid."""
REASONS: tuple[Reason, ...] = (
    *(xid.reason(code) for xid in TABLE for code in xid.codes),
    *(UNLISTED, SXID_FATAL, SXID),
)
"""All reasons that Xids and SXids can give."""


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
    """A case-insensitive regular expression for the lines of a kind.

    A line of Xid 45 may name an earlier Xid as its cause. Such a line is also a line of the kind of the earlier Xid.
    """
    lines: list[str] = []
    causes: list[int] = []
    for at, xid in enumerate(TABLE):
        if xid.kind is not kind:
            continue
        for code in xid.codes:
            others = "".join(f"(?!.*(?:{row.rest}))" for row in TABLE[:at] if code in row.codes)
            lines.append(rf"{code}\b{others}" + (f".*(?:{xid.rest})" if xid.rest else ""))
        causes += [] if xid.rest else xid.codes
    if causes:
        lines.append(rf"45\b.*\bcaused by previous Xid (?:{'|'.join(map(str, causes))})\b")
    return rf"\bXid \([^)]*\): (?:{'|'.join(lines)})"
