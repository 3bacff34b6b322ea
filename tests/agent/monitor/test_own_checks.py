"""A site's own checks. Here they are real programs."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from agent.launcher.processes import Reaper
from agent.monitor.inspection import InspectionResult
from agent.monitor.own_checks import OwnCheck
from agent.monitor.settings import CheckLimits
from everstep.errors import CannotInspect
from everstep.model.finding import Health, Owner
from everstep.system.procfs import living
from tests.agent.monitor.sites import SimulatedMachine


def run(machine: SimulatedMachine, program: str, **limits: object) -> InspectionResult:
    settings = CheckLimits(name="site-health", command=["sh", "-c", program], **limits)
    return OwnCheck(machine.site(machine="m7"), settings, {}, same_boot=True).inspect()


def test_exit_code_0_means_healthy(machine: SimulatedMachine) -> None:
    seen = run(machine, "echo all well on $EVERSTEP_MACHINE")
    assert (seen.findings, seen.note) == ([], "all well on m7")


@pytest.mark.parametrize(("code", "verdict"), [(1, Health.UNKNOWN), (2, Health.FAULTY)])
def test_a_warning_is_unknown_and_a_failure_is_faulty(machine: SimulatedMachine, code: int, verdict: Health) -> None:
    [found] = run(machine, f"echo disk is slow; echo 12 MB/s; exit {code}").findings
    assert found.verdict is verdict
    assert (found.reason, found.text, found.evidence) == ("site-health", "site-health: disk is slow", ["12 MB/s"])
    assert (found.owner, found.sure) == (Owner.MACHINE, False)


def test_a_program_can_name_reason_and_owner(machine: SimulatedMachine) -> None:
    [found] = run(machine, "echo 'everstep: reason=link-slow owner=network'; echo slow; exit 2", sure=True).findings
    assert (found.reason, found.owner, found.sure) == ("link-slow", Owner.NETWORK, True)


@pytest.mark.parametrize(
    ("program", "said"),
    [("echo cannot say; exit 3", "exit code 3: cannot say"), ("exit 127", "no output"), ("kill -9 $$", "signal 9")],
)
def test_a_program_with_an_error_of_its_own_is_unknown(machine: SimulatedMachine, program: str, said: str) -> None:
    with pytest.raises(CannotInspect, match=said):
        run(machine, program)


def test_a_missing_program_is_unknown(machine: SimulatedMachine) -> None:
    limits = CheckLimits(name="none", command=["/no/such/program"])
    with pytest.raises(CannotInspect, match="cannot be run"):
        OwnCheck(machine.site(), limits, {}, same_boot=True).inspect()


def test_a_program_that_hangs_is_ended_with_its_children(machine: SimulatedMachine) -> None:
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    with pytest.raises(CannotInspect, match=r"did not end within 0\.3 s"):
        run(machine, f"{sys.executable} -c 'import time; time.sleep(600)' {mark} & wait", deadline_s=0.3)

    deadline = time.monotonic() + 20
    while any(mark.encode() in _command(process.pid) for process in living()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_program_that_writes_endlessly_takes_no_memory(machine: SimulatedMachine) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CannotInspect, match="did not end within"):
        run(machine, "exec yes", deadline_s=0.3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # in KiB, so less than 64 MiB


def test_a_program_may_write_much_output_and_any_bytes(machine: SimulatedMachine) -> None:
    [found] = run(machine, r"head -c 3000000 /dev/zero | tr '\0' 'x'; printf '\377'; exit 2").findings
    assert len(found.text) < 1000


async def test_an_exit_code_is_known_although_the_agent_collects_its_children(machine: SimulatedMachine) -> None:
    Reaper().install()
    try:
        for _ in range(10):
            [found] = (await asyncio.to_thread(run, machine, "exit 2")).findings
            assert found.verdict is Health.FAULTY
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


def test_a_program_cannot_forge_its_exit_code(machine: SimulatedMachine) -> None:
    [found] = run(machine, "printf '\\n0123456789abcdef 0'; exit 2").findings
    assert found.verdict is Health.FAULTY
