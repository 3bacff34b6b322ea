"""The doctor shows what the machines of a deployed cluster lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.needs import KERNEL_LOG
from console import main
from controlplane import doctor
from controlplane.queries import setup
from controlplane.queries.setup import SetupAnswer
from everstep.model.finding import Health

INVENTORY = (
    '[[machine]]\nname = "gpu-0"\naddress = "127.0.0.1:1"\n[[machine]]\nname = "gpu-1"\naddress = "127.0.0.1:2"\n'
)


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(doctor, "CHECKS", ())
    path = tmp_path / "machines.toml"
    path.write_text(INVENTORY)
    return str(path)


def answered(monkeypatch: pytest.MonkeyPatch, *answers: SetupAnswer) -> None:
    async def ask(*_: object) -> list[SetupAnswer]:
        return list(answers)

    monkeypatch.setattr(setup, "ask_setup", ask)


def test_a_machine_that_does_not_answer_is_missing(inventory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--json", "--inventory", inventory]) == 1

    [found] = json.loads(capsys.readouterr().out)
    assert (found["name"], found["status"], found["machines"]) == ("agent", "missing", ["gpu-0", "gpu-1"])
    assert found["found"].startswith("all 2 machines: the agent at its address did not answer: ")


def test_a_missing_right_is_shown_with_its_line(
    inventory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lack = SetupAnswer(
        name=KERNEL_LOG.name,
        verdict=Health.FAULTY,
        text="/dev/kmsg cannot be read",
        remedy=KERNEL_LOG.remedy(),
        machines=["gpu-1"],
    )
    fine = lack.model_copy(update={"verdict": Health.HEALTHY, "text": "it can be read", "machines": ["gpu-0"]})
    answered(monkeypatch, lack, fine)

    assert main.run(["doctor", "--inventory", inventory]) == 1

    lines = " ".join(capsys.readouterr().out.split())
    assert f"missing kernel-log 1 of 2 machines (gpu-1): /dev/kmsg cannot be read → {KERNEL_LOG.remedy()}" in lines
    assert "ok kernel-log 1 of 2 machines (gpu-0): it can be read" in lines
    assert lines.endswith("missing: kernel-log")


def test_what_is_unknown_is_not_missing(
    inventory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(
        monkeypatch,
        SetupAnswer(name="gpus", verdict=Health.UNKNOWN, text="NVML does not answer", machines=["gpu-0", "gpu-1"]),
    )

    assert main.run(["doctor", "--inventory", inventory]) == 0

    assert "unknown  gpus  all 2 machines: NVML does not answer" in capsys.readouterr().out


def test_an_inventory_that_cannot_be_read_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", ())

    assert main.run(["doctor", "--json", "--inventory", str(tmp_path / "none.toml")]) == 1

    [found] = json.loads(capsys.readouterr().out)
    assert (found["name"], found["status"]) == ("inventory", "missing")
    assert "none.toml" in found["found"]
