"""Compares what ``everstep plan --measure`` computes with real saves and restores on this computer.

The rates of the computer are measured, and the plan is computed from them. Then one rank saves states of three sizes in
the host's memory, and new ranks restore them. Measurements, saves and restores take turns, and of each the fastest run
counts, since other programs can only slow a run down. All of them run with the same priority.

On a computer with other work, a run that nothing interrupts is rare. So the same comparison is made in CPU time: rates
are measured per second of CPU time, and compared with the CPU time of saves and restores.

    python -P benchmarks/plan.py
    python -P benchmarks/plan.py --sizes 64 --rounds 2
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import forks
from benchmarks.checkpoint_rank import PARAMETERS, Work
from benchmarks.checkpoint_restore import PRELOADED
from benchmarks.checkpoint_saves import everstep_environment, scratch
from benchmarks.common import environment, say
from controlplane.measure import Measured, measure_memory
from everstep.decisions.sizing.load import Load
from everstep.decisions.sizing.plan import plan_job
from everstep.decisions.sizing.restart import restore_s
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.hardware import Hardware
from everstep.rank import environment as variables
from everstep.shards.file import write_shard
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.file import SlotFile
from everstep.slots.format import backup_slots, own_slots
from everstep.slots.reader import SlotReader

SIZES = (64, 256, 512)
"""Sizes of the state, MB."""
AIM = 0.2
"""Aim for the difference between plan and measurement, as a share of what was measured."""
SAVES = 6
"""Number of saves of one turn, after those that fill the slots."""
RESTORES = 3
"""Number of restores of one turn."""
POLICY = CheckpointPolicy()


@dataclass(frozen=True, slots=True)
class Compared:
    """A number of the plan, and what was measured."""

    name: str
    unit: str
    planned: float
    measured: float

    @property
    def difference(self) -> float:
        """How much larger the planned number is, as a share of the measured one."""
        return self.planned / self.measured - 1

    @property
    def met(self) -> bool:
        """Whether the difference is within the aim."""
        return abs(self.difference) <= AIM

    def line(self, width: int) -> str:
        """The line of the table."""
        verdict = "met" if self.met else "missed"
        numbers = f"{self.planned:10.4g} {self.measured:10.4g}"
        return f"{self.name:{width}} {self.unit:4} {numbers} {100 * self.difference:+7.1f} %  {verdict}"


class Times(NamedTuple):
    """The time of a save or a restore, seconds."""

    wall: float
    cpu: float
    """CPU time of all threads."""


@dataclass(slots=True)
class Real:
    """What one size really took."""

    state_bytes: int = 0
    own_bytes: int = 0
    """Memory of the rank's slots."""
    backup_bytes: int = 0
    slot_file_bytes: int = 0
    shard_bytes: int = 0
    wall: Measured = field(default_factory=dict)
    """Rates by elapsed time."""
    cpu: Measured = field(default_factory=dict)
    """Rates by CPU time."""
    save: list[Times] = field(default_factory=list)
    restore: list[Times] = field(default_factory=list)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="sizes of the state, MB")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each size (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # as the fork server does, so that collections in a forked rank do not touch the parent's objects
    where = environment()
    found = {size: Real() for size in options.sizes}
    try:
        for turn in range(options.rounds):
            for size, real in found.items():
                real.wall = _faster(real.wall, forks.call(_rates, size, time.perf_counter))
                real.cpu = _faster(real.cpu, forks.call(_rates, size, time.process_time))
                _turn(size, real)
                save_s, restored_s = real.save[-1].wall, real.restore[-1].wall
                say(f"turn {turn + 1}, {size} MB: save {save_s:.3f} s, restore {restored_s:.3f} s")
    finally:
        gc.unfreeze()
    rows = [row for size, real in found.items() for row in compare(size, real)]
    if options.json:
        compared = [asdict(row) | {"difference": row.difference, "met": row.met} for row in rows]
        runs = {size: asdict(real) for size, real in found.items()}
        content = {"benchmark": "plan", "environment": where, "aim": AIM}
        print(json.dumps(content | {"rows": compared, "runs": runs}, indent=2))
        return
    print(f"plan: {where['cores']} cores, load {where['load']}, nice {os.nice(0)}, {where['date']}; {where['command']}")
    for size, real in found.items():
        rates = ", ".join(f"{name} {value:.3g}" for name, value in real.cpu.items())
        print(f"{size} MB, rates by CPU time: {rates}")
    width = max(len(row.name) for row in rows)
    print(f"\n{'':{width}}      {'planned':>10} {'measured':>10} {'differs':>9}  aim: {100 * AIM:.0f} %")
    for row in rows:
        print(row.line(width))


def _rates(megabytes: int, clock: Callable[[], float]) -> Measured:
    tensor = megabytes * 1_000_000 // (3 * PARAMETERS)
    return measure_memory(tensor=tensor, rounds=3, clock=clock)


def _faster(before: Measured, fresh: Measured) -> Measured:
    return {name: max(value, before.get(name, 0.0)) for name, value in fresh.items()}


def compare(size: int, real: Real) -> list[Compared]:
    """Compare the plan for a state of ``size`` MB with what was measured."""
    load = _load(real, real.wall)
    # In CPU time, one core does all the work, and no other thread shares the memory with it.
    of_one_core = _load(real, real.cpu | {"memory_gb_s": 2 * real.cpu["hash_gb_s"], "cores": 1})
    plan = plan_job(load)
    sizes = [
        ("memory of own slots", plan.memory.own, real.own_bytes),
        ("memory of backups", plan.memory.backups, real.backup_bytes),
        ("file of slots", plan.memory.own, real.slot_file_bytes),
        ("file on disk", load.state_bytes, real.shard_bytes),
    ]
    times = [
        ("save, copy and checksum", plan.saves.save_s, min(each.wall for each in real.save)),
        ("the same, CPU time", plan_job(of_one_core).saves.save_s, min(each.cpu for each in real.save)),
        ("restore from own memory", restore_s(load), min(each.wall for each in real.restore)),
        ("the same, CPU time", restore_s(of_one_core), min(each.cpu for each in real.restore)),
    ]
    return [
        *(Compared(f"{size} MB: {name}", "MB", planned / 1e6, found / 1e6) for name, planned, found in sizes),
        *(Compared(f"{size} MB: {name}", "s", planned, found) for name, planned, found in times),
    ]


def _load(real: Real, rates: Measured) -> Load:
    return Load(
        state_bytes=real.state_bytes,
        ranks=1,
        machines=2,
        step_s=10.0,
        policy=POLICY,
        hardware=Hardware.model_validate(rates | {"device_gb_s": 0.0}),
    )


def _turn(megabytes: int, real: Real) -> None:
    """Save and restore a state once, in new processes."""
    with scratch() as folder:
        saved = forks.call(_save, folder, megabytes)
        real.save += saved.pop("times")
        newest = saved.pop("newest")
        real.restore += [forks.call(_restore, folder, megabytes, newest) for _ in range(RESTORES)]
        for name, value in saved.items():
            setattr(real, name, value)


def _checkpoint(folder: Path, work: Work) -> Any:
    """The checkpoint of a rank under everstep."""
    import everstep

    values = everstep_environment(folder, 1, overlap=True) | {variables.CHECKPOINT_SLOTS: str(POLICY.slots)}
    for name, value in values.items():
        os.environ[name] = value.format(rank=0)
    return everstep.join().checkpoint(model=work.model, optimizer=work.optimizer)


def _save(folder: Path, megabytes: int) -> dict[str, Any]:
    """Fill all slots and a backup, and time further saves."""
    work = Work(megabytes, 0)
    work.optimizer.step()
    checkpoint = _checkpoint(folder, work)
    for parameter in work.model:
        parameter.grad = None  # as after a step, so that gradients are not part of the state
    taken = []
    for step in range(1, POLICY.slots + SAVES + 1):
        taken.append(_timed(lambda step=step: (checkpoint.save(step), checkpoint.wait())))  # type: ignore[misc]
    checkpoint.close()
    path = own_slots(folder, 0)
    with contextlib.closing(SlotReader(path)) as reader:
        newest = reader.headers()[-1]
        _back_up(folder, reader)
        shard = write_shard(
            folder, owner=reader.owner, topology="", header=newest, read=partial(reader.read_into, newest)
        )
    return {
        "state_bytes": newest.tensor_bytes,
        "own_bytes": path.stat().st_blocks * 512,
        "backup_bytes": backup_slots(folder, 0).stat().st_blocks * 512,
        "slot_file_bytes": path.stat().st_size,
        "shard_bytes": shard.bytes,
        "times": taken[POLICY.slots :],
        "newest": len(taken),
    }


def _back_up(folder: Path, reader: SlotReader) -> None:
    """Receive copies of the newest slots, as the agent of a peer does, until each slot of the backup is used."""
    with contextlib.closing(SlotFile(backup_slots(folder, 0), slots=POLICY.backup_slots)) as backup:
        for header in reader.headers()[-POLICY.backup_slots :]:
            with backup.receive(header) as payload:
                done, checksum = 0, PayloadChecksum()
                while count := reader.read_into(header, done, payload[done:]):
                    checksum.update(payload[done : done + count])
                    done += count
            backup.commit_received(header, checksum)


def _restore(folder: Path, megabytes: int, step: int) -> Times:
    """Restore the newest state in a new rank."""
    work = Work(megabytes, 0)
    for parameter in work.model:
        parameter.grad = None  # a new rank has no gradients
    checkpoint = _checkpoint(folder, work)
    return _timed(lambda: checkpoint.restore(step))


def _timed(work: Callable[[], object]) -> Times:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return Times(time.perf_counter() - began, time.process_time() - cpu)


if __name__ == "__main__":
    main()
