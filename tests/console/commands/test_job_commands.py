"""Commands on jobs refuse wrong usage before they contact a cluster, and name the correct usage."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.commands.run import split_arguments
from console.main import run
from console.views.parked import evidence_lines
from controlplane.references import parse_incident
from everstep.errors import ConfigError
from everstep.model.evidence import Evidence
from tests.rank_ends import exited


@pytest.fixture(autouse=True)
def nothing_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE", "TEMPORAL_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_file_a_script_or_both() -> None:
    assert split_arguments(["job.toml"]) == (Path("job.toml"), [])
    assert split_arguments(["train.py", "--steps", "3"]) == (None, ["train.py", "--steps", "3"])
    assert split_arguments(["job.toml", "train.py", "x"]) == (Path("job.toml"), ["train.py", "x"])
    with pytest.raises(ConfigError, match="nothing to run"):
        split_arguments([])


@pytest.mark.parametrize(
    ("written", "meant"),
    [("gpt", ("gpt", None)), ("gpt/2", ("gpt", 2)), ("incident/gpt/0002", ("gpt", 2)), ("job/gpt", ("gpt", None))],
)
def test_an_incident_can_be_written_in_several_ways(written: str, meant: tuple[str, int | None]) -> None:
    assert parse_incident(written) == meant


@pytest.mark.parametrize("nonsense", ["", "incident/", "gpt/x", "/2"])
def test_text_that_names_no_incident_is_refused(nonsense: str) -> None:
    with pytest.raises(ConfigError, match="names neither"):
        parse_incident(nonsense)


@pytest.mark.parametrize(
    "command",
    ["status", "checkpoints gpt", "logs gpt", "stop gpt", "resume gpt", "approve gpt", "abandon gpt/1", "attach gpt"],
)
def test_without_a_cluster_the_exit_code_is_3(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()) == 3
    assert "everstep up" in capsys.readouterr().err


def test_run_can_refuse_to_start_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    assert run(["run", "--no-up", "--", str(script)]) == 3
    assert "no cluster 'default' is up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "nothing to run"),
        (["run", "--", "no-such.py"], "no-such.py"),
        (["run", "no-such.toml"], "no-such.toml"),
        (["run", "--machines", "3", "--tp", "2", "--", __file__], "not a multiple of 2"),
        (["run", "--resume-from", "5", "--", __file__], "name it with --name or by its job file"),
        (["run", "--resume-from", "0", "--name", "gpt", "--", __file__], "--resume-from"),
        (["run", "--version", "2", "--", __file__], "--version already decides script, arguments and code"),
        (["run", "--resume-path", "/tmp", "--", __file__], "is not the folder of a checkpoint"),
        (["run", "--resume-path", "/a/b/step-000000001", "--resume-from", "1", "x.toml"], "exclude each other"),
        (["logs", "gpt", "--stream", "stdlog"], "both, stdout, stderr"),
    ],
)
def test_wrong_usage_is_reported_before_anything_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["run", "attach", "status", "logs", "stop", "resume", "approve", "abandon", "checkpoints", "demo"]
)
def test_every_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"everstep {command}" in shown
    assert "Examples:" in shown
    assert "Exit codes:" in shown


def test_the_evidence_names_the_first_rank_and_its_log() -> None:
    said = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29082"
    victim = exited(rank=0, machine="m0", code=1, time_ns=1, log_tail=said, exception=said)
    culprit = exited(
        rank=5,
        machine="m2",
        code=1,
        time_ns=2,
        completed_steps=20,
        exception="ValueError: \x1b[31mbad",
        log_tail="Traceback\nValueError: bad\n",
    )
    lines = evidence_lines("gpt", Evidence(generation=1, exits=[victim, culprit], unreachable=["m3"]), " --cluster try")
    assert lines[0] == "no answer m3"
    assert lines[1].startswith("first     rank 5 on m2, after 20 steps, exit code 1, ValueError: bad, ")
    assert lines[-1] == "logs      everstep logs gpt --rank 5 --cluster try"
    assert evidence_lines("gpt", None) == ["logs      everstep logs gpt"]
