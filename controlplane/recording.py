"""Recordings of machines' findings as lines of JSON, written by ``everstep machines`` and read by simulations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from everstep.decisions.act.evict.simulate import RecordedEvent
from everstep.errors import ConfigError
from everstep.system.log_files import STANDARD_INPUT, pieces

if TYPE_CHECKING:  # This module imports gRPC's stubs, which is slow; reading a recording does not need them.
    from controlplane.queries.machines import MachineReport

BAD_SHOWN = 10
"""At most this many bad lines of a recording are named."""
END_NS = 1 << 63
"""Upper limit of times in a recording, nanoseconds since 1970."""


class MachineRecorder:
    """Makes the lines of a recording from the answers of machines, poll by poll."""

    def __init__(self) -> None:
        self._silent_since: dict[str, int] = {}

    def lines(self, reports: Iterable[MachineReport], asked_ns: int, now_ns: int) -> list[str]:
        """One line for each machine.

        Args:
            reports: The answers to one poll.
            asked_ns: Time at which the machines were asked, by the clock of this computer.
            now_ns: Time at which all machines had answered or timed out; it is the time in the lines.
        """
        return [self._line(report, asked_ns, now_ns) for report in reports]

    def _line(self, report: MachineReport, asked_ns: int, now_ns: int) -> str:
        answered = bool(report.now_ns)
        if answered:
            self._silent_since.pop(report.machine, None)
        since_ns = now_ns if answered else self._silent_since.setdefault(report.machine, asked_ns)
        event = RecordedEvent(
            machine=report.machine,
            time_ns=now_ns,
            findings=None if report.problem else report.findings,
            silent_s=round((now_ns - since_ns) / 1e9, 3) if report.problem else None,
            problem=report.problem,
        )
        return event.model_dump_json(exclude_defaults=True)


def read_recording(name: str) -> list[RecordedEvent]:
    """Read the events of a recording, in order; empty lines are skipped.

    Args:
        name: Name of the file, which may be a gzip file; ``-``: standard input.

    Raises:
        ConfigError: the recording cannot be read, has no event, or has bad lines; the message names the bad lines.
    """
    path = Path(name)
    if name != STANDARD_INPUT and not path.exists():
        raise ConfigError(f"there is no recording {name}: 'everstep machines --record {name}' makes one")
    if path.is_dir():
        raise ConfigError(f"{name} is a folder: name the recording in it")
    events, problems = [], []
    for number, line in enumerate(b"".join(pieces(name)).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            events.append(_event(line))
        except ConfigError as problem:
            problems.append(f"{name}, line {number}: {problem}")
    if problems:
        count = f"{len(problems)} bad lines" if len(problems) > 1 else "a bad line"
        more = [f"and {len(problems) - BAD_SHOWN} more"] if len(problems) > BAD_SHOWN else []
        raise ConfigError("\n  - ".join([f"the recording has {count}:", *problems[:BAD_SHOWN], *more]))
    if not events:
        raise ConfigError(f"the recording {name} has no events: 'everstep machines --record {name}' adds some")
    return events


def _event(line: bytes) -> RecordedEvent:
    """Parse one event.

    Raises:
        ConfigError: it is not an event; the message says why.
    """
    try:
        read = json.loads(line.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from None
    if isinstance(read, list):
        raise ConfigError("expected one event, not a list: jq -c '.[]' writes the events as lines")
    if not isinstance(read, dict):
        raise ConfigError('expected an object, e.g. {"machine": "m0", "time_ns": 1763730000000000000, "findings": []}')
    try:
        event = RecordedEvent.model_validate(read)
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(detail) for detail in error.errors())) from None
    if not 0 <= event.time_ns < END_NS or not 0 <= event.now_ns < END_NS:
        raise ConfigError("time_ns and now_ns: expected nanoseconds since 1970")
    facts = (event.findings, event.finding, event.silent_s, event.stepping)
    if not event.problem and all(fact is None for fact in facts):
        raise ConfigError("no fact about the machine: expected findings, finding, silent_s or stepping")
    return event


def _problem(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    text = str(detail["msg"])
    return f"{key}: {text[:1].lower()}{text[1:]}"


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")
