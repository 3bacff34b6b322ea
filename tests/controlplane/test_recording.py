"""Recordings of machines: a simulation reads what a command wrote, and each wrong line is reported."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.queries.machines import MachineReport
from controlplane.recording import BAD_SHOWN, MachineRecorder, read_recording
from everstep.decisions.act.evict.simulate import RecordedEvent
from everstep.errors import ConfigError
from everstep.model.finding import Finding, Health

S = 10**9
NOW = 1_763_730_000 * S
LOST = Finding(inspection="gpu", reason="gpu-lost", item="GPU 3", sure=True, since_ns=NOW - 5 * S)


def answered(machine: str = "m0", **fields: Any) -> MachineReport:
    return MachineReport(machine=machine, address="h:1", verdict=Health.HEALTHY, now_ns=NOW + 7 * S, **fields)


def silent(machine: str = "m1") -> MachineReport:
    return MachineReport(machine=machine, address="h:2", verdict=Health.UNKNOWN, problem="it does not answer")


def rounds(tmp_path: Path, *reports: list[MachineReport]) -> list[RecordedEvent]:
    """Record rounds that begin a minute apart and take 2 s each, and return the events that are read back."""
    recorder, path = MachineRecorder(), tmp_path / "events.jsonl"
    with path.open("w") as file:
        for number, one in enumerate(reports):
            asked_ns = NOW + number * 60 * S
            file.writelines(f"{line}\n" for line in recorder.lines(one, asked_ns, asked_ns + 2 * S))
    return read_recording(str(path))


def test_what_machines_say_comes_back(tmp_path: Path) -> None:
    events = rounds(tmp_path, [answered(), answered("m1", findings=[LOST])])

    assert [(event.machine, event.findings) for event in events] == [("m0", []), ("m1", [LOST])]
    assert {event.at_ns for event in events} == {NOW + 2 * S}, "all machines of a round get the same time"


def test_silence_is_counted_from_the_first_time_that_it_was_asked_in_vain(tmp_path: Path) -> None:
    events = rounds(tmp_path, [answered("m1")], [silent()], [silent()], [answered("m1")], [silent()])

    assert [event.silent_s for event in events] == [None, 2.0, 62.0, None, 2.0]
    assert all(event.findings is None for event in events if event.problem)


def test_an_agent_without_a_monitor_is_heard(tmp_path: Path) -> None:
    events = rounds(tmp_path, [silent("m0")], [answered(problem="its monitor is off")])

    assert [event.silent_s for event in events] == [2.0, 0.0]


def test_an_entry_of_the_command_s_json_is_an_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl.gz"
    path.write_bytes(gzip.compress(f"\n{answered(findings=[LOST]).model_dump_json()}\n".encode()))

    [event] = read_recording(str(path))
    assert (event.findings, event.at_ns) == ([LOST], NOW + 7 * S)


GOOD = {"machine": "m0", "time_ns": NOW, "findings": []}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes (column 2)"),
        ('{"machine": "m0", "silent_s": NaN}', "not JSON: NaN is not a number"),
        ("[" * 100_000, "not JSON: "),
        ("[]", "expected one event, not a list: jq -c '.[]' writes the events as lines"),
        ("7", "expected an object, e.g. "),
        (json.dumps({"time_ns": NOW, "findings": []}), "machine: field required"),
        (json.dumps(GOOD | {"machine": ""}), "machine: string should have at least 1 character"),
        (json.dumps(GOOD | {"findings": [{"inspection": "gpu"}]}), "findings.0.reason: field required"),
        (json.dumps(GOOD | {"silent_s": -1}), "silent_s: input should be greater than or equal to 0"),
        ('{"machine": "m0", "silent_s": 1e999}', "silent_s: input should be a finite number"),
        (json.dumps(GOOD | {"time_ns": -1}), "time_ns and now_ns: expected nanoseconds since 1970"),
        (json.dumps(GOOD | {"time_ns": 0, "now_ns": 1 << 70}), "time_ns and now_ns: expected nanoseconds since 1970"),
        ('{"machine": "m0"}', "no fact about the machine: expected findings, finding, silent_s or stepping"),
        ('{"machine": "m\udcff"}', "not UTF-8 text (byte 14)"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(f"{json.dumps(GOOD)}\n\n{line}\n".encode(errors="surrogateescape"))

    with pytest.raises(ConfigError) as told:
        read_recording(str(path))
    assert str(told.value).startswith(f"the recording has a bad line:\n  - {path}, line 3: {problem}")


def test_every_bad_line_is_told_and_many_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("{\n" * (BAD_SHOWN + 3))

    with pytest.raises(ConfigError) as told:
        read_recording(str(path))
    lines = str(told.value).splitlines()
    assert (lines[0], len(lines)) == (f"the recording has {BAD_SHOWN + 3} bad lines:", BAD_SHOWN + 2)
    assert lines[-1] == "  - and 3 more"


def test_what_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for path, problem in (
        (tmp_path / "none", "there is no recording"),
        (tmp_path, "is a folder: name the recording in it"),
        (tmp_path / "empty", "has no events"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_recording(str(path))
