"""The arithmetic of the checkpoint benchmark, and its exchange at a small size."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import pytest

from benchmarks import checkpoint_exchange, forks
from benchmarks.checkpoint_rank import Sample
from benchmarks.checkpoint_saves import Saves
from benchmarks.checkpoint_throughput import Case


def samples(*blocking: float, waited: float = 0.0) -> list[Sample]:
    return [Sample(save=one / 2, gate=one / 2, waited=waited, step=1.0) for one in blocking]


def test_what_blocks_is_save_and_gate_without_the_wait_for_earlier_saves() -> None:
    found = Saves(64, samples={"everstep": samples(0.001, 0.003, waited=5.0)})
    assert found.blocking("everstep") == [0.001, 0.003]
    assert found.blocking("DLRover memory") == []


def test_saves_are_held_against_dlrover_and_the_stager() -> None:
    found = Saves(
        64,
        samples={
            "everstep": samples(0.002),
            "DLRover memory": samples(0.02),
            "DCP stager": samples(0.003),
        },
    )
    met = {row.name: row.met for row in found.rows() if row.aim}
    assert met == {
        f"save of 64 MB in 24 tensors blocks, {peer}, {label}": peer == "DLRover"
        for peer in ("DLRover", "DCP's stager")
        for label in ("median", "p90", "maximum")
    }


def test_first_saves_have_rows_and_lines_of_their_own() -> None:
    found = Saves(
        64,
        samples={"everstep": samples(0.002), "blocking copy": samples(0.01)},
        first={"everstep": samples(0.03, 0.05), "blocking copy": samples(0.04)},
    )
    rows = {row.name: row for row in found.rows()}
    first = rows["first 3 saves of 64 MB in 24 tensors block, blocking copy, maximum"]
    assert (first.ours, first.peer, first.aim) == (0.05, 0.04, None)
    assert rows["save of 64 MB in 24 tensors blocks, blocking copy, maximum"].ours == 0.002
    _, below = found.table().split("The first 3 of each turn:")
    assert "0.0500" in below and "0.0020" not in below


def test_throughput_is_compared_between_neighbouring_blocks() -> None:
    # The machine is slow in a quarter of the steps, and in half of the steps with saves. Each save costs half a
    # percent.
    with_s, without_s = [[1.005, 1.005, 1.6, 1.6]] * 10, [[1.0, 1.0, 1.0, 1.6]] * 10
    best, every = Case(1, 64, True, with_s=with_s, without_s=without_s).rows()
    assert best.ours == pytest.approx(1 / 1.005) and best.peer == 1.0 and best.met
    assert every.ours == pytest.approx(4 / 5.21) and every.peer == pytest.approx(4 / 4.6)
    assert every.met is False, "the mean must reach the aim, too"
    missed, _ = Case(1, 64, True, with_s=[[1.02]] * 4, without_s=[[1.0]] * 4).rows()
    assert missed.met is False


def test_the_aim_needs_a_core_to_spare_and_a_failed_case_has_no_figures() -> None:
    assert Case(2, 64, True, with_s=[[1.0]], without_s=[[1.0]]).rows()[0].aim is None
    failed = Case(1, 64, True, failure="no room")
    assert failed.rows() == []
    assert "no room" in failed.note()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer versions of Python warn of a fork with threads
class TestForks:
    def test_a_call_runs_in_another_process(self) -> None:
        assert forks.call(os.getpid) != os.getpid()

    def test_a_failure_and_a_death_are_told(self) -> None:
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            forks.call(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match=r"died \(3\)"):
            forks.call(os._exit, 3)

    def test_questions_are_answered_until_the_end(self) -> None:
        def doubles(pipe: Connection) -> str:
            forks.answer(pipe, 2 * pipe.recv())
            forks.answer(pipe, 2 * pipe.recv())
            return "over"

        other = forks.Forked(doubles)
        assert (other.ask(1), other.ask(4), other.result()) == (2, 8, "over")
        other.close()

    def test_slots_travel_in_every_way(self) -> None:
        found = checkpoint_exchange.measure(1, runs=2)
        assert {len(seconds) for seconds in found.seconds.values()} == {2}
        assert found.seconds.keys() == found.cpu.keys()
        assert all(row.ours and row.ours > 0 for row in found.rows())
        assert "bare socket" in found.table()
