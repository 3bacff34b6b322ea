"""``everstep classify`` gives a verdict from logs alone."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from console import main
from console.commands.classify import verdict_text
from everstep.decisions.blame.classify.first_cause import classify_end

FULL = (
    'Traceback (most recent call last):\n  File "/job/t.py", line 3, in save\n'
    "OSError: [Errno 28] No space left on device\n"
)
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.12]:4213\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rank-0.log").write_text(CLOSED)
    (tmp_path / "rank-1.log.gz").write_bytes(gzip.compress(FULL.encode()))
    return tmp_path


def test_a_folder_of_logs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["classify", str(folder)]) == 0

    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == ("disk full, owner storage on rank 1: OSError: [Errno 28] No space left on device")
    assert f"{folder}/rank-1.log.gz:3" in shown
    assert "/job/t.py:3 in save" in shown
    assert "consequence" in shown


def test_json_has_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["classify", str(folder / "rank-1.log.gz"), "--json", "--exit-code", "1"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        *("class", "owner", "reason", "consequence", "decided_by", "ranks", "place", "evidence", "count", "others"),
        *("exit", "lines"),
    ]
    assert (found["class"], found["exit"]["code"], found["evidence"][0]["line"]) == ("disk full", 1, 3)


def test_standard_input_and_unknown(tmp_path: Path) -> None:
    program = "import sys, console.main; sys.exit(console.main.run(['classify', '-']))"
    done = subprocess.run([sys.executable, "-P", "-c", program], input=b"step 1\n", capture_output=True, check=False)

    assert (done.returncode, done.stdout.split(b"\n")[0]) == (4, b"unknown, owner unknown: no rule matches a line")


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for given, words in (
        ([str(tmp_path / "x")], "there is no file"),
        ([str(tmp_path / "empty")], "has no files"),
        ([], "no log"),
    ):
        assert main.run(["classify", *given]) == 2
        assert words in capsys.readouterr().err


def test_a_gzip_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(gzip.compress(("step 1\n" * 99 + FULL + "step 1\n" * 99).encode(), 1)[:-9])

    assert main.run(["classify", str(tmp_path / "a.log")]) == 0


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, console.commands.classify\n"
        "print(*[name for name in ('torch', 'temporalio', 'grpc', 'numpy', 'sqlalchemy') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def test_a_consequence_is_called_one() -> None:
    first = verdict_text(classify_end(CLOSED, "", 1)).splitlines()[0]

    assert first.startswith(
        "connection lost, owner unknown, a consequence; the cause is not in these logs: RuntimeError"
    )


def test_a_log_gives_a_terminal_no_commands() -> None:
    shown = verdict_text(classify_end("ValueError: \x1b[2J\x1b]0;title\x07bad", "", 1))

    assert "\x1b" not in shown
    assert shown.startswith("user exception, owner code: ValueError: bad")
