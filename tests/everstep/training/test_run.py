"""``join``, ``steps`` and ``report``, inside and outside everstep."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import CheckpointError, ConfigError, CorruptCheckpoint, TopologyError
from everstep.rank import environment
from everstep.rank.step_reports import GRAD_NORM, LOSS, ReportFile
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader, held
from everstep.training.checkpoint import Checkpoint

StartRank = Callable[..., ReportFile]


class Counter:
    """A state that is one number."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.usefixtures("outside")
def test_outside_everstep_nothing_is_kept_and_everything_works(tmp_path: Path) -> None:
    run = everstep.join()
    assert (run.active, run.rank, run.world_size, run.mesh_shape()) == (False, 0, 1, (1, 1, 1))
    counter = Counter()
    state = run.checkpoint(counter=counter)
    assert not state.active
    seen = []
    for step in run.steps(5, state):
        run.report(step, loss=torch.tensor(1.0))
        seen.append(step)
    assert (seen, run.resumed_from) == ([0, 1, 2, 3, 4], None)


def test_torchrun_s_environment_gives_the_place(monkeypatch: pytest.MonkeyPatch, outside: None) -> None:
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    run = everstep.join(tp=2, pp=2)
    assert (run.topology.machines, run.local_rank) == (4, 1)
    assert (run.coordinate.tp, run.coordinate.pp, run.coordinate.dp) == (1, 1, 0)
    run = everstep.join(mesh={"dp_replicate": 2, "dp_shard": -1})
    assert (run.mesh_shape(), run.coordinate["dp_shard"], run.coordinate.dp) == ((2, 4), 1, 5)
    with pytest.raises(TopologyError, match="give either mesh or those"):
        everstep.join(tp=2, mesh={"dp": 8})
    run = everstep.join(mesh={"dp_shard": 4, "tp": 2}, groups=["ep=4:dp_shard+tp"])
    assert run.topology.group(5, "ep") == (4, 5, 6, 7)
    with pytest.raises(TopologyError, match="8 ranks cannot be split into tp 3"):
        everstep.join(tp=3)
    monkeypatch.setenv("WORLD_SIZE", "eight")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'eight'"):
        everstep.join()


def test_steps_are_saved_and_reported(start_rank: StartRank, shm: Path) -> None:
    agent = start_rank()
    run, counter = everstep.join(), Counter()
    assert agent.snapshot().attached
    state = run.checkpoint(counter=counter)
    for step in run.steps(3, state):
        seen = agent.snapshot()
        assert seen.completed_steps == step
        assert seen.milestones["restored"] and bool(seen.milestones["first_step"]) == (step > 0)
        counter.value += 10
        run.report(step, loss=1.5 * step, grad_norm=torch.tensor(2.0), tokens=7)
    seen = agent.snapshot()
    assert (seen.completed_steps, seen.finished) == (3, True)
    assert [(r.step, r.loss, r.grad_norm, r.tokens) for r in agent.records(0)[1]] == [
        (0, 0.0, 2.0, 7),
        (1, 1.5, 2.0, 7),
        (2, 3.0, 2.0, 7),
    ]
    assert sorted(slot.completed_steps for slot in held(shm / "checkpoint-0")) == [2, 3]


def test_a_new_generation_goes_on_where_the_job_stood(start_rank: StartRank) -> None:
    start_rank(1)
    run, counter = everstep.join(), Counter()
    with pytest.raises(ZeroDivisionError):
        for step in run.steps(10, run.checkpoint(counter=counter)):
            counter.value += 10
            1 / (5 - step)
    agent = start_rank(2, resume=4)  # another rank had completed only 4 steps
    run, counter = everstep.join(), Counter()
    seen: list[int] = []
    for step in run.steps(10, run.checkpoint(counter=counter)):
        if not seen:
            assert (run.resumed_from, counter.value, agent.snapshot().completed_steps) == (4, 40, 4)
        seen.append(step)
        counter.value += 10
    assert (seen, counter.value) == ([4, 5, 6, 7, 8, 9], 100)


def test_room_for_backups_is_asked_for_at_the_beginning_only(
    start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Checkpoint, "check_room", lambda _, *, ranks, backup_slots, where: asked.append(backup_slots))
    monkeypatch.setenv(environment.BACKUP_SLOTS, "2")
    for generation, resume in ((1, -1), (2, 2)):
        start_rank(generation, resume=resume)
        run, counter = everstep.join(), Counter()
        for _ in run.steps(3, run.checkpoint(counter=counter)):
            counter.value += 1
    assert asked == [2, 0]


def test_a_fresh_start_forgets_old_checkpoints(start_rank: StartRank, shm: Path) -> None:
    for generation, agreed in ((1, 0), (2, -1)):
        start_rank(generation, resume=agreed)
        run, counter = everstep.join(), Counter()
        steps = run.steps(10, run.checkpoint(counter=counter))
        assert next(steps) == 0
        assert not any(slot.valid for slot in held(shm / "checkpoint-0"))
        assert (next(steps), next(steps)) == (1, 2)
        assert sorted(slot.completed_steps for slot in held(shm / "checkpoint-0")) == [1, 2]


def test_a_step_that_this_rank_does_not_hold_is_an_error(start_rank: StartRank) -> None:
    start_rank(1, resume=7)
    run = everstep.join()
    with pytest.raises(CheckpointError, match=r"does not have the state after step 7 .it has: none"):
        next(run.steps(10, run.checkpoint(counter=Counter())))


def test_without_a_state_steps_are_counted_from_where_the_script_says(start_rank: StartRank, shm: Path) -> None:
    agent = start_rank(resume=-1)
    run = everstep.join()
    assert list(run.steps(6, start=4)) == [4, 5]
    assert agent.snapshot().completed_steps == 6
    assert not (shm / "checkpoint-0").exists()


def test_warm_up_runs_twice_before_a_restore_and_leaves_no_gradient(start_rank: StartRank) -> None:
    def train(resume: int, generation: int) -> list[str]:
        start_rank(generation, resume=resume)
        run, model, events = everstep.join(), torch.nn.Linear(2, 1), []

        def warm_up() -> None:
            events.append("warm up")
            model(torch.ones(1, 2)).sum().backward()

        for step in run.steps(2, run.checkpoint(model=model), warm_up=warm_up):
            assert model.weight.grad is None
            events.append(f"step {step}")
        return events

    assert train(0, 1) == ["step 0", "step 1"]
    assert train(1, 2) == ["warm up", "warm up", "step 1"]


FORKS = """
import os, sys, torch, everstep
run = everstep.join()
for step in run.steps(3, run.checkpoint(model=torch.nn.Linear(2, 1))):
    if step == 1:
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
"""


def test_a_child_that_ends_within_the_loop_does_not_leave_it_for_its_parent(start_rank: StartRank) -> None:
    reports = start_rank(slots=4)
    subprocess.run([sys.executable, "-c", FORKS], check=True)
    milestones = reports.snapshot().milestones
    assert milestones["first_step"] and not milestones["loop_left"]


RAISES = """
import torch, everstep
run = everstep.join()
steps = run.steps(6, run.checkpoint(model=torch.nn.Linear(3000, 3000)))
for step in steps:
    if step == 3:
        raise IndexError("in the script")
"""


def test_the_last_save_is_waited_for_where_a_name_holds_the_loop(start_rank: StartRank, shm: Path) -> None:
    start_rank(slots=4)
    done = subprocess.run([sys.executable, "-c", RAISES], check=False, capture_output=True, text=True)
    assert "IndexError: in the script" in done.stderr
    assert 3 in {slot.completed_steps for slot in held(shm / "checkpoint-0") if slot.valid}


def test_the_loop_is_entered_once(start_rank: StartRank) -> None:
    start_rank()
    run = everstep.join()
    list(run.steps(1))
    with pytest.raises(ConfigError, match="entered twice"):
        list(run.steps(1))


def test_a_topology_that_is_not_the_job_s_names_both(start_rank: StartRank) -> None:
    start_rank(topology="4,2,2,2,dp-pp-tp")
    run = everstep.join()
    assert (run.world_size, run.topology.tp, run.topology.axes) == (8, 2, ("dp", "pp", "tp"))
    everstep.join(tp=2, pp=2, order=("dp", "pp", "tp"))
    with pytest.raises(TopologyError, match=r"joins with dp 1, pp 2, tp 4, but .* was started with dp 2, pp 2, tp 2"):
        everstep.join(tp=4)
    start_rank(topology="4,2,pp=2,dp_shard=4,ep=4:dp_shard")
    assert everstep.join().topology.group(0, "ep") == (0, 1, 2, 3)
    everstep.join(mesh={"pp": 2, "dp_shard": -1})
    everstep.join(groups=["ep=4:dp_shard"])
    with pytest.raises(TopologyError, match=r"joins with pp 2, dp_shard 4, ep 2 over dp_shard, but .* ep 4 over"):
        everstep.join(groups=["ep=2:dp_shard"])
    with pytest.raises(TopologyError, match=r"script joins with pp 1, dp 4, tp 2, but"):
        everstep.join(tp=2)
    start_rank(topology="4,2,2")
    with pytest.raises(ConfigError, match=r"EVERSTEP_TOPOLOGY: the topology is '4,2,2'; it must read like"):
        everstep.join()


def test_things_without_a_state_are_named(start_rank: StartRank) -> None:
    start_rank()
    with pytest.raises(ConfigError, match=r"checkpoint.data=.* got a list, which has no state_dict"):
        everstep.join().checkpoint(model=torch.nn.Linear(1, 1), data=[])  # type: ignore[arg-type]


def test_what_a_report_does_not_give_is_told_from_what_is_nan(start_rank: StartRank) -> None:
    agent, run = start_rank(), everstep.join()
    run.report(0, loss=1.0)
    run.report(1, loss=math.nan, grad_norm=torch.tensor(math.inf))
    run.report(2, tokens=7)

    records = agent.records(0)[1]
    assert [record.given for record in records] == [LOSS, LOSS | GRAD_NORM, 0]
    assert math.isnan(records[0].grad_norm) and math.isnan(records[2].loss)


def test_import_everstep_is_light() -> None:
    heavy = ["torch", "numpy", "pydantic", "grpc", "temporalio", "xxhash"]
    code = "import sys, everstep, everstep.rank.step_reports, everstep.rank.drill_faults, everstep.rank.environment; "
    code += "import everstep.model.topology; "
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_slots_need_no_torch() -> None:
    code = "import everstep.slots.file, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_rank_does_not_restore_the_slot_of_another_rank_job_or_run(
    start_rank: StartRank, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {environment.JOB: "gpt", environment.RUN: "run-2"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    start_rank()
    run, model = everstep.join(), nn.Linear(4, 4)
    for _ in run.steps(2, run.checkpoint(model=model)):
        pass
    mine = SlotOwner("gpt", "run-2", 0)
    assert SlotReader(shm / "checkpoint-0").owner == mine
    for other in (SlotOwner("gpt", "run-2", 4), SlotOwner("bert", "run-2", 0), SlotOwner("gpt", "run-1", 0)):
        (shm / "checkpoint-0").unlink()
        with contextlib.closing(SlotFile(shm / "checkpoint-0", owner=other)) as file:
            Checkpoint({"model": model}, file).save(7)
        start_rank(2, resume=7)
        again = everstep.join()
        with pytest.raises(CorruptCheckpoint, match=f"it has the state of {other}, and not of {mine}"):
            next(again.steps(9, again.checkpoint(model=model)))
