"""What an agent needs, and where the line that provides it has to be added."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import needs
from agent.needs import NEEDS, WHERE, Need, StartedBy
from everstep.system import procfs

GUIDE = (Path(__file__).parents[2] / "docs/guides/containers.md").read_text()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No container, no pod, no unit."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setattr(needs, "CONTAINER_FILES", (tmp_path / ".dockerenv",))
    monkeypatch.setattr(procfs, "cgroups", lambda: [([], "/user.slice/user-1000.slice/session-3.scope")])
    for function in (needs.started_by, needs.unit):
        function.cache_clear()
    yield
    for function in (needs.started_by, needs.unit):
        function.cache_clear()


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.name)
@pytest.mark.parametrize("runs", StartedBy)
def test_every_need_has_one_line_everywhere(need: Need, runs: StartedBy) -> None:
    remedy = need.remedy(runs)

    where = WHERE[runs] if runs in need.lines else WHERE[StartedBy.SHELL]
    assert remedy == f"{where}: {need.lines.get(runs, need.machine)}"
    assert "\n" not in remedy
    assert len(remedy) < 200, "a finding keeps 300 characters, and the problem comes first"


@pytest.mark.parametrize("need", [need for need in NEEDS if StartedBy.DOCKER in need.lines], ids=lambda need: need.name)
def test_the_guide_starts_a_container_with_every_option(need: Need) -> None:
    command = GUIDE.partition("```\ndocker run")[2].partition("```")[0]

    options = need.lines[StartedBy.DOCKER].split(", ")[0]

    assert all(f" {option}" in command for option in re.split(r" (?=--?\w)", options)), options


def test_a_shell() -> None:
    assert (needs.started_by(), needs.unit()) == (StartedBy.SHELL, "")


@pytest.mark.parametrize(
    "group", ["/system.slice/everstep-agent.service", "/system.slice/system-x.slice/everstep-agent.service/init"]
)
def test_a_unit(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "cgroups", lambda: [([], group)])

    assert (needs.started_by(), needs.unit()) == (StartedBy.UNIT, "everstep-agent.service")


def test_a_container_and_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    assert needs.started_by() is StartedBy.DOCKER
    needs.started_by.cache_clear()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")

    assert needs.started_by() is StartedBy.KUBERNETES
