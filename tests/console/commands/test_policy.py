"""``everstep policy`` shows the rules as text for a person, and as JSON for a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console import main
from everstep.decisions.act.evict.rules import RULES


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which no cluster runs. Returns the test's folder."""
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    monkeypatch.delenv("EVERSTEP_INVENTORY", raising=False)
    return tmp_path


@pytest.fixture
def job_file(home: Path) -> Path:
    """The file of a job of six machines whose policy asks an operator about network faults."""
    (home / "train.py").write_text("")
    path = home / "gpt.toml"
    path.write_text(
        'script = "train.py"\nmachines = 6\n[policy]\nsilence.evict_s = 30.0\nevict.share = 0.5\n'
        '[policy.evict.rules]\nrepeated-network-alert = "approve"\ngone-machine = "off"\n'
    )
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["policy", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys)
    lines = [" ".join(line.split()) for line in out.splitlines()]

    assert (code, lines[0]) == (0, "policy of evictions: defaults")
    titles = [line for line in lines if line[:1].isdigit()]
    names = [f"{place} {rule.name}" for place, rule in enumerate(RULES, 1)]
    assert [title.partition(":")[0] for title in titles] == [*names, f"{len(RULES) + 1} breaker"]
    assert titles[0] == "1 operator: act (evicts)"
    assert titles[1] == "2 sure-machine-fault: act (evicts)"
    assert "12 application-caused: never evicts, only explains why not" in titles
    assert any(line.startswith("policy.silence.evict_s = 2 default ") for line in lines)
    fixed = next(line for line in lines if line.startswith("alerts_within_s = 300 fixed "))
    assert fixed.endswith("(ByteRobust, figure 5)")


def test_a_job_file(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, str(job_file))

    assert code == 0
    for line in (
        f"policy of evictions: job file {job_file}, 6 machines",
        "3  repeated-network-alert: approve (asks an operator), by policy.evict.rules",
        "4  gone-machine: off (is not applied), by policy.evict.rules",
        "    3 of 6 machines may leave without an operator",
    ):
        assert line in out.splitlines()
    assert "policy.silence.evict_s = 30  default 2" in out


def test_the_highest_mode_of_all_rules_is_shown(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file.write_text('script = "train.py"\n[policy.evict]\nmode = "shadow"\n')
    _, out, _ = call(capsys, "show", str(job_file))

    assert out.splitlines()[1] == "policy.evict.mode = shadow: no rule may do more than that"
    assert "2  sure-machine-fault: shadow (only records), by policy.evict.mode" in out
    assert "13  unknown-verdict: never evicts, only explains why not" in out


def test_the_json_has_the_same_facts(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--json", str(job_file))
    policy = json.loads(out)

    assert code == 0
    assert [rule["mode"] for rule in policy["rules"][1:4]] == ["act", "approve", "off"]
    assert policy["breaker"]["without_operator"] == 3
    assert policy["rules"][3]["numbers"][0]["source"] == ""


def test_errors_are_explained(job_file: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file.write_text('script = "train.py"\n[policy.evict]\nmode = "shade"\n')
    code, out, err = call(capsys, str(job_file))
    assert (code, out) == (2, "")
    assert "policy.evict.mode = 'shade' in gpt.toml: expected one of act, approve, shadow, off" in err
    code, _, err = call(capsys, str(home / "none.toml"))
    assert (code, "there is no job file" in err) == (2, True)
    code, _, err = call(capsys, "gpt")
    assert (code, "no cluster 'default' is up" in err) == (3, True)


def test_the_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")

    assert code == 0
    assert "show" in out
