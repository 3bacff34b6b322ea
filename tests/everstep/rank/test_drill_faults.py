"""Each fault of a drill really happens, only once, and leaves a mark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from everstep.rank import environment
from everstep.rank.drill_faults import RankFaults, claim, fired, load_plan

RANK = """
import sys
from everstep.rank.drill_faults import RankFaults
faults = RankFaults.from_environment(int(sys.argv[1]))
for step in range(10):
    if faults is not None:
        faults.meet("step", step)
        faults.meet("save", step)
    print(step, flush=True)
"""


def plan(folder: Path, *faults: dict[str, Any]) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps([{"id": f"f{index}", **fault} for index, fault in enumerate(faults)]))
    return path


def run_rank(path: Path, rank: int = 1, more: Mapping[str, str] | None = None) -> tuple[int, list[int], str]:
    """Run a real process that meets its faults. Returns its exit code, the steps that it did, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(rank)],
        env={environment.FAULTS: str(path), "PYTHONPATH": str(Path(__file__).parents[3]), **(more or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [int(line) for line in done.stdout.split()], done.stderr


@pytest.mark.parametrize("name", ["KILL", "SEGV", "ABRT"])
def test_a_killed_rank_dies_in_its_step_and_only_once(tmp_path: Path, name: str) -> None:
    path = plan(tmp_path, {"fault": "kill-rank", "rank": 1, "at_step": 4, "signal": name})
    assert run_rank(path)[:2] == (-signal.Signals["SIG" + name], [0, 1, 2, 3])
    seen = fired(path, {"id": "f0"})
    assert seen is not None and seen["time_ns"] > 0
    assert run_rank(path)[:2] == (0, list(range(10)))
    assert fired(path, {"id": "f0"}) == seen


def test_other_ranks_are_left_alone(tmp_path: Path) -> None:
    path = plan(tmp_path, {"fault": "kill-rank", "rank": 1, "at_step": 4})
    assert run_rank(path, rank=2)[:2] == (0, list(range(10)))
    assert fired(path, {"id": "f0"}) is None


def test_a_kill_during_save_waits_for_the_save(tmp_path: Path) -> None:
    path = plan(tmp_path, {"fault": "kill-during-save", "rank": 1, "at_step": 2})
    assert run_rank(path)[:2] == (-signal.SIGKILL, [0, 1])


def test_exit_and_exception(tmp_path: Path) -> None:
    path = plan(
        tmp_path,
        {"fault": "raise", "rank": 1, "at_step": 1, "exception": "IndexError"},
        {"fault": "exit-rank", "rank": 2, "at_step": 2, "code": 0},
    )
    code, steps, stderr = run_rank(path, 1)
    assert (code, steps) == (1, [0])
    assert "IndexError: injected by a drill: IndexError" in stderr
    assert run_rank(path, 2)[:2] == (0, [0, 1])


def test_faults_of_one_plan_have_marks_of_their_own(tmp_path: Path) -> None:
    """Two faults have the same id but different marks, as in a plan of several drills."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    path = tmp_path / "plan.json"
    given = [
        {"id": "f0", "fault": "exit-rank", "rank": 1, "at_step": step, "code": step, "marks": str(marks)}
        for step, marks in ((3, first), (6, second))
    ]
    path.write_text(json.dumps(given))
    assert run_rank(path)[:2] == (3, [0, 1, 2])
    assert fired(first, {"id": "f0"}) and not fired(second, {"id": "f0"})
    assert run_rank(path)[0] == 6
    assert fired(path, given[1]) == fired(second, {"id": "f0"}) is not None
    assert run_rank(path)[0] == 0


def test_what_comes_after_a_fault_strikes_processes_that_began_later(tmp_path: Path) -> None:
    path = plan(
        tmp_path,
        {"fault": "exit-rank", "rank": 1, "at_step": 4, "code": 3},
        {"fault": "exit-rank", "rank": 1, "at_step": 2, "code": 5, "after": str(tmp_path / "plan.json.f0")},
        {"fault": "exit-rank", "rank": 2, "at_step": 1, "code": 7, "after": str(tmp_path / "plan.json.f0")},
    )
    assert run_rank(path, rank=2)[0] == 0, "the fault of rank 2 waits for the first fault, which has not fired yet"
    assert run_rank(path)[:2] == (3, [0, 1, 2, 3])
    assert run_rank(path)[:2] == (5, [0, 1])
    assert run_rank(path)[0] == 0
    assert run_rank(path, rank=2)[:2] == (7, [0])


def test_many_claimants_one_winner(tmp_path: Path) -> None:
    path = plan(tmp_path, {"fault": "kill-rank", "rank": 1, "at_step": 4})
    with ThreadPoolExecutor(6) as all_at_once:
        codes = sorted(code for code, *_ in all_at_once.map(run_rank, [path] * 6))
    assert codes == [-signal.SIGKILL, 0, 0, 0, 0, 0]
    assert {file.name for file in tmp_path.iterdir()} >= {"plan.json", "plan.json.f0"}


def test_threads_of_one_process_may_meet_a_fault_at_once(tmp_path: Path) -> None:
    path, together = tmp_path / "plan.json", Barrier(4, timeout=20)

    def meet(number: int) -> int:
        won = 0
        for index in range(60):
            together.wait()
            won += claim(path, {"id": f"f{index}"}, place="x" * number * 100)  # the marks have different lengths
        return won

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(meet, range(4))) == 60
    assert all(fired(path, {"id": f"f{index}"}) for index in range(60))


def test_without_a_plan_nothing_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.FAULTS, raising=False)
    assert load_plan() is None
    assert RankFaults.from_environment(0) is None
    monkeypatch.setenv(environment.FAULTS, str(tmp_path / "gone"))
    assert RankFaults.from_environment(0) is None


def test_an_unknown_fault_and_an_unknown_exception_are_named(tmp_path: Path) -> None:
    for fault, message in (
        ({"fault": "melt", "rank": 0}, "no rank fault is called 'melt'"),
        ({"fault": "raise", "rank": 0, "exception": "NoSuchError"}, "'NoSuchError' is not a built-in exception"),
    ):
        path = plan(tmp_path, fault)
        (tmp_path / "plan.json.f0").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=message):
            RankFaults(path, json.loads(path.read_text()), 0).meet("step", 0)


def meeting(path: Path, rank: int, monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[int]:
    """Return the steps in which a process gets a NaN."""
    monkeypatch.setenv(environment.FAULTS, str(path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    faults = RankFaults.from_environment(rank)
    steps: list[int] = []
    for step in range(10):
        if faults is not None:
            faults.actions["nan"] = lambda _, step=step: steps.append(step)  # type: ignore[misc]
            faults.meet("begin", step)
    return steps


def test_a_rank_that_is_poisoned_lives_on_and_the_next_time_is_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"fault": "nan", "rank": 1, "at_step": 4, "point": "begin"}
    path = plan(tmp_path, one, one)
    assert [meeting(path, rank, monkeypatch) for rank in (0, 1, 1, 1)] == [[], [4], [4], []]


def test_what_is_wrong_in_the_job_alone_is_so_from_the_beginning_of_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the job, bits are wrong from step 8 on. In a replay after that, they are wrong from its first step on."""
    one = {"fault": "bitflip", "machine": "m2", "only_in_job": True, "at_step": 8, "point": "begin"}
    path, flips = plan(tmp_path, one), list[int]()
    here = {"EVERSTEP_MACHINE": "m2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", environment.FAULTS: str(path)}
    for name, value in here.items():
        monkeypatch.setenv(name, value)

    def meet(world: int) -> list[int]:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        faults, flips[:] = RankFaults.from_environment(0), []
        for step in range(10):
            if faults is not None:
                faults.actions["bitflip"] = lambda _, step=step: flips.append(step)  # type: ignore[misc]
                faults.meet("begin", step)
        return list(flips)

    assert meet(1) == [], "with one machine, nothing is computed together with another machine"
    monkeypatch.setenv(environment.REPLAY_STEPS, "10")
    assert meet(2) == [8, 9], "the machine breaks at step 8, even in a replay, since it was not broken before"
    assert meet(2) == list(range(10))
    assert meet(1) == []
    for every, shows in ((2, [2, 4]), (0, [])):
        plan(tmp_path, one | {"shows_every": every})
        found = {}
        for generation in range(1, 5):
            monkeypatch.setenv(environment.GENERATION, str(generation))
            found[generation] = meet(2)
        assert found == {number: list(range(10)) if number in shows else [] for number in range(1, 5)}
    monkeypatch.delenv(environment.REPLAY_STEPS)
    assert meet(2) == [8, 9]


def test_a_check_aborts_where_bits_flip_in_its_generation(tmp_path: Path) -> None:
    path = plan(tmp_path, {"fault": "check", "of": "flip", "rank": 1, "at_step": 4})
    flips = tmp_path / "plan.json.flip.flips"
    assert run_rank(path)[1] == list(range(10)), "no bits were flipped"
    flips.touch()
    os.utime(flips, (1.0, 1.0))
    assert run_rank(path)[1] == list(range(10)), "the bits were flipped before this process began"
    later = time.time() + 3600
    os.utime(flips, (later, later))
    assert run_rank(path, 0)[1] == list(range(10)), "the check belongs to rank 1, and this is rank 0"
    for _ in range(2):
        assert run_rank(path)[:2] == (-signal.SIGABRT, [0, 1, 2, 3]), "each process aborts when it comes to step 4"
    assert fired(path, {"id": "f0"}) is not None
    assert run_rank(path, more={environment.REPLAY_STEPS: "10"})[1] == list(range(10)), "a replay makes no check"


def test_what_is_bound_to_a_machine_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"fault": "nan", "rank": 1, "machine": "m2", "at_step": 4, "point": "begin"}
    path = plan(tmp_path, one)
    assert meeting(path, 1, monkeypatch, EVERSTEP_MACHINE="m0", LOCAL_RANK="0") == []
    assert meeting(path, 5, monkeypatch, EVERSTEP_MACHINE="m2", LOCAL_RANK="1") == []
    assert meeting(path, 4, monkeypatch, EVERSTEP_MACHINE="m2", LOCAL_RANK="0") == [4]
