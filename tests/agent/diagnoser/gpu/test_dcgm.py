"""The diagnostic tests that run ``dcgmi``. Here it is a program that prints recorded output and changes clocks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agent.diagnoser.diagnoser import Diagnoser
from agent.diagnoser.diagnostic import Bench
from agent.diagnoser.gpu import dcgm
from agent.diagnoser.gpu.clocks import GpuClocks, are_kept, keep_clocks
from agent.diagnoser.gpu.dcgm import DcgmTest, DcgmTestLimits, EudTest, EudTestLimits
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError
from everstep.model.diagnosis import DiagnosticResult
from everstep.model.finding import Health
from tests.agent.agents import until
from tests.agent.diagnoser.gpu.dcgm_reports import gpu, report, warning

SMI = """#!/bin/sh
# Keeps the clocks of one GPU in a file.
clocks={folder}/clocks
case "$1" in
--query-gpu=*) echo "0, $(cat $clocks), 700.00, Enabled" ;;
*) [ "$3" = -ac ] && {restores} ;;
esac
exit 0
"""
RESTORES = 'echo "$4" | awk -F, \'{print $2", "$1}\' >$clocks'


def installed(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def dcgmi(folder: Path, output: str, code: int = 0, also: str = "true") -> str:
    (folder / "output").write_text(output)
    return installed(
        folder, "dcgmi", f'#!/bin/sh\necho "$@" >{folder}/asked\n{also}\ncat {folder}/output\nexit {code}\n'
    )


@pytest.fixture(autouse=True)
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of this computer: nvidia-smi fails, as it does without a driver."""
    monkeypatch.setattr(dcgm, "gpus", lambda: 0)
    folder = tmp_path / "no-driver"
    folder.mkdir()
    installed(folder, "nvidia-smi", "#!/bin/sh\nexit 9\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def said_by(command: str) -> DiagnosticResult:
    return DcgmTest(Bench("m0", folder=Path(command).parent), DcgmTestLimits(command=command)).run()


def unable(found: DiagnosticResult) -> str:
    """Return why the machine could not be tested."""
    [finding] = found.findings
    assert (finding.reason, finding.verdict) == ("test-unable", Health.UNKNOWN)
    return finding.text


def test_a_machine_without_gpus_and_dcgm_has_nothing_to_test() -> None:
    assert said_by("no-such-dcgmi").nothing == "no GPU"


def test_a_machine_with_gpus_and_without_dcgm_cannot_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm, "gpus", lambda: 8)
    assert "is not installed" in unable(said_by("no-such-dcgmi"))


@pytest.mark.parametrize(
    ("severity", "reason", "verdict"),
    [
        (2, "dcgm-isolate", Health.FAULTY),
        (6, "dcgm-reset", Health.FAULTY),
        (5, "dcgm-setup", Health.UNKNOWN),
        (1, "dcgm-reported", Health.UNKNOWN),
        (4, "dcgm-reported", Health.UNKNOWN),
    ],
)
def test_a_severity_decides_reason_and_verdict(tmp_path: Path, severity: int, reason: str, verdict: Health) -> None:
    found = said_by(dcgmi(tmp_path, report(gpu(0, "Pass"), gpu(3, "Fail", warning(severity))), 205))

    [finding] = found.findings
    assert (finding.reason, finding.item, found.verdict) == (reason, "GPU 3 of DCGM", verdict)
    assert finding.sure == (verdict is Health.FAULTY)
    assert found.measures == {"passed_results": 1.0}
    assert (tmp_path / "asked").read_text() == "diag -r 2 -j\n"


def test_eud_is_requested_by_name_and_needs_root(tmp_path: Path) -> None:
    command = dcgmi(tmp_path, report(gpu(0, "Fail", warning(5, error=90)), name="eud"))
    assert "EUD was not run as root" in unable(EudTest(Bench("m0"), EudTestLimits(command=command)).run())
    assert (tmp_path / "asked").read_text() == "diag -r eud -j\n"


@pytest.mark.parametrize("error", [90, 92])
def test_an_untested_gpu_does_not_hide_the_fault_of_another_gpu(tmp_path: Path, error: int) -> None:
    said = report(gpu(0, "Fail", warning(5, error=error)), gpu(3, "Fail", warning(2, error=95)), name="eud")
    found = said_by(dcgmi(tmp_path, said, 205))

    assert {(one.reason, one.item) for one in found.findings} == {
        ("test-unable", "GPU 0 of DCGM"),
        ("dcgm-isolate", "GPU 3 of DCGM"),
    }
    assert found.verdict is Health.FAULTY


def test_unreadable_clocks_do_not_hide_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clocks").write_text("1980, 2619\n")
    installed(tmp_path, "nvidia-smi", SMI.replace("{folder}", str(tmp_path)).replace("{restores}", "true"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = said_by(dcgmi(tmp_path, report(gpu(3, "Fail", warning(2))), 205, also=f"echo >{tmp_path}/clocks"))

    assert [one.reason for one in found.findings] == ["dcgm-isolate", "clocks-changed"]
    assert found.verdict is Health.FAULTY


def test_a_machine_is_untested_if_all_tests_are_skipped(tmp_path: Path) -> None:
    found = said_by(dcgmi(tmp_path, report(gpu(0, "Skip"), name="eud")))
    assert "all of its tests were skipped: eud" in unable(found)


def test_a_diagnostic_that_hangs_is_ended(tmp_path: Path) -> None:
    command = dcgmi(tmp_path, "", also="sleep 600")
    found = DcgmTest(Bench("m0"), DcgmTestLimits(command=command, deadline_s=0.3)).run()
    assert "did not end within" in unable(found)


async def diagnosing(folder: Path) -> tuple[Diagnoser, asyncio.Task[None]]:
    """Start a diagnosis in which DCGM changes the clocks and does not end."""
    (folder / "clocks").write_text("1980, 2619\n")
    installed(folder, "nvidia-smi", SMI.replace("{folder}", str(folder)).replace("{restores}", RESTORES))
    dcgmi(folder, "", also=f"echo '1200, 2619' >{folder}/clocks; sleep 600")
    diagnoser = Diagnoser("m0", "127.0.0.1", folder, {})
    run = diagnoser.start(pb.DiagnoseRequest(request_id="1", tests=[pb.TestToRun(name="dcgm")]))

    async def follow() -> None:
        async for _ in diagnoser.follow(run):
            pass

    following = asyncio.create_task(follow())
    await until(lambda: "1200" in (folder / "clocks").read_text(), "the diagnostic runs", 60)
    return diagnoser, following


async def test_clocks_are_set_back_after_a_diagnostic_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is killed because ranks are launched."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    diagnoser, following = await diagnosing(tmp_path)
    await diagnoser.end("ranks are launched")

    assert (tmp_path / "clocks").read_text().split() == ["1980,", "2619"]
    assert not are_kept(tmp_path)
    with pytest.raises(AgentError, match="ranks are launched"):
        await following
    diagnoser.close()
    diagnoser._process.close()


async def test_an_agent_sets_clocks_back_that_the_agent_before_it_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "clocks").write_text("1200, 2619\n")
    installed(tmp_path, "nvidia-smi", SMI.replace("{folder}", str(tmp_path)).replace("{restores}", RESTORES))
    keep_clocks(tmp_path, {"0": GpuClocks("1980", "2619", "700.00", "Enabled")})
    diagnoser = Diagnoser("m0", "127.0.0.1", tmp_path, {})
    await until(lambda: not are_kept(tmp_path), "the clocks are set back")
    diagnoser.close()
    diagnoser._process.close()

    assert (tmp_path / "clocks").read_text().split() == ["1980,", "2619"]


@pytest.mark.parametrize(("restores", "told"), [(RESTORES, []), ("true", ["clocks-changed"])])
def test_clocks_that_a_diagnostic_changed_are_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restores: str, told: list[str]
) -> None:
    (tmp_path / "clocks").write_text("1980, 2619\n")
    installed(tmp_path, "nvidia-smi", SMI.replace("{folder}", str(tmp_path)).replace("{restores}", restores))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = said_by(dcgmi(tmp_path, report(gpu(0, "Pass")), also=f"echo '1200, 2619' >{tmp_path}/clocks"))

    assert [one.reason for one in found.findings] == told
    assert (tmp_path / "clocks").read_text() == ("1200, 2619\n" if told else "1980, 2619\n")


def test_locked_clocks_are_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = SMI.replace("{folder}", str(tmp_path)).replace("{restores}", f'echo "$@" >>{tmp_path}/set')
    installed(tmp_path, "nvidia-smi", smi.replace("*) [", f'-lgc) echo "$@" >>{tmp_path}/set ;;\n*) ['))
    (tmp_path / "clocks").write_text("1980, 2619\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    limits = DcgmTestLimits(command=dcgmi(tmp_path, report(gpu(0, "Pass"))), lock_clocks="1410,1410")

    assert DcgmTest(Bench("m0", folder=tmp_path), limits).run().findings == []
    assert (tmp_path / "set").read_text() == "-lgc 1410,1410\n"
