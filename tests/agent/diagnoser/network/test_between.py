"""Diagnostic tests between two machines, here two processes on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.model.diagnosis import DiagnosticResult
from everstep.model.finding import Health
from tests.agent.diagnoser.forked import Run, forked_tests


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with forked_tests(tmp_path_factory.mktemp("other")) as run:
        yield run


def paired(one: Run, two: Run, test: str, theirs: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return the results of both machines; the second machine connects to the first, which waits for it."""
    found: list[DiagnosticResult] = []
    secret = settings.pop("secret", "known")

    def follow(port: int) -> None:
        peer = {"position": 1, "secret": secret, "host": "127.0.0.1", "port": port}
        going = threading.Thread(target=lambda: found.append(two(test, peer=peer, **settings | (theirs or {}))))
        going.start()
        threads.append(going)

    threads: list[threading.Thread] = []
    waiting = one(test, peer={"position": 0, "secret": "known", "host": "", "port": 0}, waits=follow, **settings)
    for thread in threads:
        thread.join(60)
    return waiting, found[0]


@pytest.mark.parametrize(
    ("test", "settings"),
    [("nic", {"seconds": 0.1}), ("all-gather", {"mb": 1, "rounds": 1}), ("all-gather", {"mb": 1, "ranks": 2})],
)
def test_two_machines_exchange_bytes(forked: Run, other: Run, test: str, settings: dict[str, Any]) -> None:
    for found in paired(forked, other, test, **settings):
        assert found.verdict is Health.HEALTHY, found.findings
        assert found.measures["bytes_per_second"] > 0
        assert found.kind


def test_a_machine_to_which_no_peer_connects_gives_up(forked: Run) -> None:
    peer = {"position": 0, "secret": "known", "host": "", "port": 0}
    nic = forked("nic", peer=peer, deadline_s=1.0)
    gather = forked("all-gather", peer=peer, answer_s=1.0)

    assert [one.reason for one in nic.findings] == ["nic-failed"]
    assert [one.reason for one in gather.findings] == ["all-gather-failed"]
    assert nic.verdict is gather.verdict is Health.UNKNOWN


def test_a_machine_that_cannot_reach_its_peer_gives_up(forked: Run) -> None:
    peer = {"position": 1, "secret": "known", "host": "127.0.0.1", "port": 1}
    nic = forked("nic", peer=peer, answer_s=1.0)
    gather = forked("all-gather", peer=peer, answer_s=1.0)

    assert [one.reason for one in nic.findings] == ["nic-failed"]
    assert [one.reason for one in gather.findings] == ["all-gather-failed"]


def test_a_different_number_of_processes_is_no_fault(forked: Run, other: Run) -> None:
    _, found = paired(forked, other, "all-gather", {"ranks": 2}, mb=1, ranks=1, answer_s=3.0)
    assert [one.reason for one in found.findings] == ["test-unable"]


def test_a_peer_with_a_wrong_secret_is_refused(forked: Run, other: Run) -> None:
    waiting, _ = paired(forked, other, "nic", secret="guessed", seconds=0.1)
    assert [one.reason for one in waiting.findings] == ["test-unable"]
