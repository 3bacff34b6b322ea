"""What an agent needs, and where the line that provides it has to be added."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import needs
from agent.needs import NEEDS, WHERE, Need, Runs


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No container, no pod, no unit."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setattr(needs, "CONTAINER_FILES", (tmp_path / ".dockerenv",))
    monkeypatch.setattr(needs.procfs, "cgroups", lambda: [([], "/user.slice/user-1000.slice/session-3.scope")])
    for function in (needs.started_by, needs.unit):
        function.cache_clear()
    yield
    for function in (needs.started_by, needs.unit):
        function.cache_clear()


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.name)
@pytest.mark.parametrize("runs", Runs)
def test_every_need_has_one_line_everywhere(need: Need, runs: Runs) -> None:
    remedy = need.remedy(runs)

    where = WHERE[runs] if runs in need.lines else WHERE[Runs.SHELL]
    assert remedy == f"{where}: {need.lines.get(runs, need.machine)}"
    assert "\n" not in remedy
    assert len(remedy) < 200, "a finding keeps 300 characters, and the problem comes first"


def test_a_shell() -> None:
    assert (needs.started_by(), needs.unit()) == (Runs.SHELL, "")


@pytest.mark.parametrize(
    "group", ["/system.slice/everstep-agent.service", "/system.slice/system-x.slice/everstep-agent.service/init"]
)
def test_a_unit(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs.procfs, "cgroups", lambda: [([], group)])

    assert (needs.started_by(), needs.unit()) == (Runs.UNIT, "everstep-agent.service")


def test_a_container_and_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    assert needs.started_by() is Runs.DOCKER
    needs.started_by.cache_clear()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")

    assert needs.started_by() is Runs.KUBERNETES
