"""Lines as they stand in logs: colours, prefixes of launchers, times."""

from __future__ import annotations

import re
from datetime import UTC, datetime

SHOWN = 400
"""Characters of a line that are kept as evidence."""

_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_STAMP = (
    r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T _](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?:[.,](?P<fraction>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_PARTS = ("year", "month", "day", "hour", "minute", "second")
_TIME = re.compile(_STAMP)
_PREFIX = re.compile(
    r"(?:\s*(?:"
    r"\[(?:[Rr]ank|default|trainer)[ :]?(?P<bracket>\d+)\]:?"  # torch's excepthook, torchrun
    r"|(?P<label>\d{1,6}): "  # srun --label, mpirun
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:"  # mpirun
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\)"  # ray
    rf"|\[?{_STAMP}\]?(?= )"
    r") ?)+"
)
_RANK_ANYWHERE = re.compile(r"\[[Rr]ank ?(\d+)\]|\bRank (\d+)\]|\(local_rank: \d+\) rank[: ](\d+)|^\s+rank\s*: (\d+)")
_RANK_OF_FILE = re.compile(
    r"(?:^|[/_.-])rank[_.-]?(\d+)(?=[^0-9]|$)|/attempt_\d+/(\d+)/std(?:err|out)\.log$", re.IGNORECASE
)
_QUIET = re.compile(
    r"(?<!NCCL )(?<!=)\b(?:WARN(?:ING)?(?! {2,}[A-Z])|INFO|DEBUG|NOTICE)\b|^[WI]\d{4} |Warning: ", re.IGNORECASE
)
_TRIED_AGAIN = re.compile(r"\b(?:retry|retrying|trying again)\b", re.IGNORECASE)


def clean(line: str) -> str:
    """A line without colours, NULs and other control characters."""
    return _ESCAPES.sub("", line) if not line.isprintable() else line


def without_prefix(line: str) -> tuple[str, int | None]:
    """A cleaned line without what a launcher or a logger put before it, and the rank that the prefix names."""
    found = _PREFIX.match(line)
    if not found:
        return line, None
    rank = found["bracket"] or found["label"] or found["mpi"]
    return line[found.end() :], None if rank is None else int(rank)


def rank_in(line: str) -> int | None:
    """The rank that a line names as its own; None: none."""
    found = _RANK_ANYWHERE.search(line)
    return next((int(group) for group in found.groups() if group), None) if found else None


def rank_of_file(name: str) -> int | None:
    """The rank that a log is of by its name: ``rank-3.log``, ``attempt_0/3/stderr.log``; None: it does not say."""
    found = _RANK_OF_FILE.search(name)
    return next((int(group) for group in found.groups() if group), None) if found else None


def says_it_goes_on(line: str) -> bool:
    """Whether a line is a warning or less by its own words: what it tells of was survived.

    NCCL and the events of Kubernetes call a warning what ends a process.
    """
    return _QUIET.search(line) is not None or is_tried_again(line)


def is_tried_again(line: str) -> bool:
    """Whether a line says that what failed is tried again."""
    return _TRIED_AGAIN.search(line) is not None


def time_of(line: str) -> float | None:
    """Seconds since 1970 of a line's own date and time, ISO 8601 or nearly so; None: it has none.

    A time without a zone is read as UTC: the logs of one job are taken to be of one zone.
    """
    found = _TIME.search(line, 0, 200)
    if not found:
        return None
    try:
        year, month, day, hour, minute, second = map(int, found.group(*_PARTS))
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    offset = 0
    if (zone := found["zone"]) and zone != "Z":
        offset = (60 * int(zone[1:3]) + int(zone[-2:])) * (60 if zone[0] == "+" else -60)
    return moment.timestamp() - offset + float(f"0.{found['fraction'] or 0}")
