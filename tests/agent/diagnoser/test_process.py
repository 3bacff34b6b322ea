"""Each diagnostic test runs in its own process, with a time limit, and leaves no processes behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from agent.diagnoser.child import VARIABLE
from agent.diagnoser.diagnostic import CRASHED, HANGS, UNABLE
from agent.diagnoser.process import DiagnosisProcess, DiagnosticRequest
from agent.launcher.processes import family_of
from everstep.model.diagnosis import DiagnosticResult
from everstep.model.finding import Health
from tests.agent.diagnoser.forked import Run

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"begun": os.getpid()}), flush=True)
    BODY
"""


def asked(**settings: object) -> DiagnosticRequest:
    return DiagnosticRequest("memory", json.dumps(settings), {"machine": "m0"}, 0.5)


def child(body: str) -> DiagnosisProcess:
    return DiagnosisProcess([sys.executable, "-c", CHILD.replace("BODY", body)])


def reasons(result: DiagnosticResult) -> list[str]:
    return [one.reason for one in result.findings]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(600)", HANGS),
        ("import subprocess; subprocess.run(['setsid', 'sleep', '600'])", HANGS),
        ("print('nonsense', file=sys.stderr); sys.exit(3)", CRASHED),
        ("print(json.dumps({'ended': 11}), flush=True)", CRASHED),
    ],
)
def test_a_test_that_hangs_or_crashes_is_unknown_and_leaves_no_process(body: str, reason: object) -> None:
    process = child(body)
    found = process.run(asked(), lambda _: None)
    mark = f"{VARIABLE}={process._mark}"
    process.close()

    assert reasons(found) == [reason.code]  # type: ignore[attr-defined]
    assert found.verdict is Health.UNKNOWN
    deadline = time.monotonic() + 20
    while family_of(-1, mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert family_of(-1, mark) == []


def test_the_finding_has_the_last_line_of_a_crashed_test() -> None:
    process = child("print('a driver fell over', file=sys.stderr); sys.exit(3)")
    assert "a driver fell over" in process.run(asked(), lambda _: None).findings[0].text
    process.close()


def test_a_program_that_cannot_be_started_is_unknown() -> None:
    process = DiagnosisProcess(["/nonexistent"])
    for _ in range(2):
        assert reasons(process.run(asked(), lambda _: None)) == [UNABLE.code]


def test_after_a_test_was_ended_the_next_test_has_a_new_process() -> None:
    process = child("time.sleep(600)")
    found: list[DiagnosticResult] = []
    waiting = threading.Thread(target=lambda: found.append(process.run(DiagnosticRequest("memory", "", {}, 600), len)))  # type: ignore[arg-type]
    waiting.start()
    while not process.pid:
        time.sleep(0.01)
    first = process.pid
    process.end()
    waiting.join(20)

    assert reasons(found[0]) == [CRASHED.code]
    assert reasons(process.run(asked(), lambda _: None)) == [HANGS.code]
    assert process.pid != first
    process.close()


def test_a_test_returns_its_results_or_is_unknown(forked: Run, tmp_path: Path) -> None:
    fine = forked("memory", mb=2, seconds=0.01)
    unable = forked("memory", mb=0.001)

    assert (fine.verdict, fine.test) == (Health.HEALTHY, "memory")
    assert fine.seconds > 0
    assert reasons(unable) == [UNABLE.code]
    assert "could be tested" in unable.findings[0].text


def test_a_diagnosis_ends_with_its_agent(tmp_path: Path) -> None:
    """A diagnosis ends when its agent is killed during a test."""
    program = f"""
import json, os, sys
from agent.diagnoser.process import DiagnosisProcess, DiagnosticRequest
process = DiagnosisProcess()
bench = dict(machine="m0", host="127.0.0.1", folder={str(tmp_path)!r}, environment={{}},
             peer=dict(position=0, secret="x", host="", port=0))
def waits(port):
    print(process._mark, flush=True)
process.run(DiagnosticRequest("nic", "", bench, 600), waits)
"""
    import subprocess

    with subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    ) as agent:
        assert agent.stdout
        mark = f"{VARIABLE}={agent.stdout.readline().decode().strip()}"
        assert family_of(-1, mark)
        agent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while family_of(-1, mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert family_of(-1, mark) == []
