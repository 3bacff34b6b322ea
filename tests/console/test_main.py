"""The command line: every command exists and has a help text, and errors have an exit code and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from console import main


def everstep(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "console.main", *arguments],
        env=os.environ | (env or {}) | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_help_lists_every_command() -> None:
    shown = everstep("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in main.COMMANDS)


HELP = """
import json, os, sys
from console import main

shown = {}
for name in main.COMMANDS:
    reading, writing = os.pipe()
    if not (pid := os.fork()):  # a separate process, without the imports of other commands
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        code = main.run([name, "--help"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    shown[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def shown_help() -> dict[str, tuple[int, str]]:
    """Exit code and output of each command with --help."""
    command = [sys.executable, "-P", "-c", HELP]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=True)
    return {name: (code, text) for name, (code, text) in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_loads_and_explains_itself(name: str, shown_help: dict[str, tuple[int, str]]) -> None:
    code, text = shown_help[name]
    assert code == 0, text
    assert "Usage:" in text and f" {name} " in text


def test_an_unknown_command_is_wrong_usage() -> None:
    shown = everstep("trian")
    assert shown.returncode == 2
    assert "trian" in shown.stderr


def test_an_error_of_ours_is_one_line(tmp_path: Path) -> None:
    shown = everstep("down", "--cluster", "no such name", env={"EVERSTEP_HOME": str(tmp_path)})
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: 'no such name' is not a cluster name")
    assert "Traceback" not in shown.stderr


def test_an_error_that_nobody_expected_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "app", lambda _: dict[str, str]()["missing"])
    assert main.run([]) == 1
    assert "KeyError: 'missing'" in capsys.readouterr().err


def test_doctor_finds_what_is_needed(tmp_path: Path) -> None:
    shown = everstep("doctor", "--json", env={"EVERSTEP_HOME": str(tmp_path)})
    findings = {finding["name"]: finding for finding in json.loads(shown.stdout)}
    assert shown.returncode == (1 if any(finding["status"] == "missing" for finding in findings.values()) else 0)
    assert findings["python"]["status"] == findings["torch"]["status"] == "ok"


def test_doctor_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TEMPORAL_CONFIG_FILE": str(tmp_path / "none")}
    shown = everstep("doctor", env=env | {"EVERSTEP_HOME": str(tmp_path), "TEMPORAL_ADDRESS": ""})
    assert shown.returncode == 1
    assert "make temporal" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "missing: temporal"


def test_a_module_beside_the_user_hides_nothing(tmp_path: Path) -> None:
    for name in ("agent", "console", "workflows", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')\n")
    script = Path(sys.executable).with_name("everstep")
    shown = subprocess.run([script, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("everstep ")


@pytest.mark.parametrize(
    ("modules", "slow"),
    [("controlplane.client, console.views.follower", "sqlalchemy"), ("activities.ledger", "alembic")],
)
def test_nobody_waits_for_an_import_that_is_not_used(modules: str, slow: str) -> None:
    program = f"import sys, {modules}; print(sorted({{{slow!r}, 'torch'}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
