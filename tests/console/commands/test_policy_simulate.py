"""``everstep policy simulate`` of a recording: its text for a person, and its JSON for a script."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from console import main

EVENTS = Path(__file__).resolve().parents[2] / "data" / "policy-events.jsonl"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Show times in UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["policy", "simulate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def job_file(folder: Path, policy: str) -> str:
    (folder / "train.py").write_text("")
    (folder / "gpt.toml").write_text(f'script = "train.py"\nmachines = 8\n{policy}\n')
    return str(folder / "gpt.toml")


def test_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, str(EVENTS))

    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "the evictions that the policy would have made if the job had failed at every event: an upper limit",
        "policy defaults",
        "events 80 of 5 machines, 2026-11-23 23:50:10 to 2026-11-23 23:51:50, 1 min 40 s",
        "",
        "2026-11-23 23:50:25 act m1 sure-machine-fault gpu-lost GPU 0000:01:00: the GPU has fallen off the bus: "
        "it names this machine for sure -> not healthy again",
        "2026-11-23 23:51:10 act m2 gone-machine silent-machine nothing was heard from its agent and ranks for 5.0 s: "
        "it is gone -> not healthy again",
        "",
        "their cost",
        "evicted 2 of 5 machines, 2 times",
        "operator asked never; the breaker tripped never",
        "only recorded never",
        "cost 0.03 of 0.14 machine hours without the evicted machines (25.0 %)",
    ]


def test_the_policy_of_a_job_file_is_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, '[policy.evict.rules]\nsure-machine-fault = "shadow"\ngone-machine = "approve"')
    code, out, _ = call(capsys, str(EVENTS), "--job", path)
    lines = [" ".join(line.split()) for line in out.splitlines()]

    assert code == 0
    assert lines[1] == f"policy job file {path}"
    assert lines[2].startswith("events 80 of 8 machines, ")
    assert lines[4].startswith("2026-11-23 23:50:25 shadow m1 sure-machine-fault gpu-lost ")
    assert lines[5].startswith("2026-11-23 23:51:10 approve m2 gone-machine silent-machine ")
    assert "operator asked once; the breaker tripped never" in lines
    assert "only recorded once" in lines


def test_the_breaker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, "[policy.evict]\nshare = 0.0\nat_least = 1")
    _, out, _ = call(capsys, str(EVENTS), "--job", path)

    assert "breaker" in out.splitlines()[6]
    assert "1 machines of 8 would be evicted, 1 were evicted within the last 24 h" in out
    assert "the breaker tripped once" in out


def test_the_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, str(EVENTS), "--json")
    done = json.loads(out)

    assert code == 0
    assert [one["eviction"]["machine"] for one in done["done"]] == ["m1", "m2"]
    assert (done["policy"], done["machines_out"], done["events"]) == ("defaults", 2, 80)
    assert done["machine_hours"] == pytest.approx(5 * done["hours"])
    assert done["machine_hours_out"] == pytest.approx(done["machine_hours"] / 4, rel=0.01)


def test_lines_without_a_time_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"machine": "m0", "findings": []}\n')
    code, out, _ = call(capsys, str(path))
    lines = [" ".join(line.split()) for line in out.splitlines()]

    assert code == 0
    assert "left out lines without a time: 1" in lines
    assert "nothing" in lines
    assert "cost 0.00 of 0.00 machine hours without the evicted machines (-)" in lines


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_bad_line_is_an_error_without_partial_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(EVENTS.read_text() + '{"machine": "m0", "findings": 7}\n')
    code, out, err = call(capsys, str(path), *more)

    assert (code, out) == (2, "")
    assert err == f"error: the recording has a bad line:\n  - {path}, line 81: findings: input should be a valid list\n"


def test_a_wrong_job_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, str(EVENTS), "--job", job_file(tmp_path, '[policy.evict]\nmode = "yes"'))

    assert (code, out) == (2, "")
    assert "expected one of act, approve, shadow, off" in err
