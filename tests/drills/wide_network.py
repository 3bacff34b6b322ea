"""Drills on machines with separate networks, called as a script calls them. Run by ``make drills``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from controlplane.local.network import NAMED
from drills.clusters.network import missing

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=f"machines can have no network of their own here: {missing()}"),
]
SMALL = ["--machines", "3", "--ranks-per-machine", "1", "--tp", "1", "--pp", "1", "--at-step", "10"]
FOUR = ["--machines", "4", "--ranks-per-machine", "1", "--tp", "1", "--pp", "1", "--at-step", "10"]


def drill(*words: str, standbys: int = 0, evicted: Sequence[str] = (), sizes: Sequence[str] = SMALL) -> dict[str, Any]:
    before = set(NAMED.glob("everstep-*"))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "console.main", "drill", *words, *sizes, "--standbys", f"{standbys}", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert set(NAMED.glob("everstep-*")) <= before, "the drill removed its networks"
    found: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, found["problems"]) == (0, []), done.stderr
    assert found["fired"] and found["losses_match"] and found["state_match"]
    assert found["leaked"] == [] and found["evicted"] == list(evicted) and found["duplicates"] == 0
    return found


@pytest.mark.parametrize("seconds", ["6", "45"])
def test_a_link_is_down(seconds: str) -> None:
    """The longer outage lasts longer than a stop waits. Then the job is parked, and continues without an operator."""
    found = drill("link-down", "--machine", "m2", "--seconds", seconds)
    assert found["resolution"] == "reattempt"
    assert found["steps_lost"] <= 1


def test_a_long_outage_of_a_link_costs_a_standby_and_no_rank_runs_twice() -> None:
    """The machine comes back with its ranks, which hang. No job gets the machine before these ranks have ended."""
    found = drill("link-down", "--machine", "m2", "--seconds", "60", standbys=1, evicted=["m2"])
    assert (found["resolution"], len(found["incidents"])) == ("eviction", 1)
    assert found["steps_lost"] <= 1


def test_a_short_outage_of_a_link_costs_no_standby() -> None:
    assert drill("link-down", "--machine", "m2", "--seconds", "6", standbys=1)["resolution"] == "reattempt"


def test_a_machine_is_cut_off_from_the_control_host() -> None:
    found = drill("cut-off", "--machine", "m1", "--from", "control", "--seconds", "20", standbys=1)
    assert (found["resolution"], found["incidents"], found["steps_lost"]) == ("absorbed", [], 0)


@pytest.mark.parametrize("fault", ["kill-postgres", "kill-workers"])
def test_a_part_of_the_control_plane_is_killed_and_a_rank_dies(fault: str) -> None:
    found = drill(fault, "--rank", "1", "--seconds", "5")
    assert found["resolution"] == "reattempt"
    assert len(found["incidents"]) == 1


@pytest.mark.parametrize(
    ("fault", "options", "incidents"),
    [("nic-down", ["--machine", "m1"], 1), ("nic-flap", ["--machine", "m1"], 0), ("switch-down", [], 1)],
)
def test_a_second_network_card_fails(fault: str, options: list[str], incidents: int) -> None:
    """No machine leaves, because the job does not need the second cards.

    One incident reports all links that are down. A link that flapped is only noted.
    """
    found = drill(fault, *options, standbys=1)
    assert (found["resolution"], len(found["incidents"]), found["steps_lost"]) == ("observed", incidents, 0)


def test_a_slow_link_costs_no_machine() -> None:
    """The vote finds that the ranks only wait, and that no rank is slow."""
    found = drill(
        "slow-link", "--between", "m0", "m1", sizes=["--machines", "4", "--ranks-per-machine", "1"], standbys=1
    )
    assert (found["incidents"], found["steps_lost"], found["generations"]) == (found["incidents"][:1], 0, 1)


@pytest.mark.parametrize(("one", "other"), [("m1", "m2"), ("m0", "m3")])
def test_no_packet_passes_between_two_machines(one: str, other: str) -> None:
    """Samples of the ranks name no machine, and a restart does not help. A test between machines then finds the link.

    In the second case, one of the machines is m0, which has the rendezvous store.
    """
    found = drill("cut-link", "--between", one, other, sizes=FOUR, standbys=1, evicted=[other])
    assert (found["resolution"], len(found["incidents"])) == ("eviction", 1)
    assert found["steps_lost"] <= 1
