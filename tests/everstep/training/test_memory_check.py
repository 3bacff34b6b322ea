"""The estimated size of a state, and the error if there is not enough room for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import CheckpointError
from everstep.rank import environment
from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.training import memory_check
from everstep.training.memory_check import check_room, estimated_bytes
from everstep.training.state.codec import encode


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((torch.optim.Adam, {}), (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.NAdam, {})),
        *((torch.optim.RAdam, {}), (torch.optim.Adamax, {}), (torch.optim.Adadelta, {}), (torch.optim.ASGD, {})),
        *((torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})),
        *((torch.optim.RMSprop, {}), (torch.optim.RMSprop, {"momentum": 0.9, "centered": True})),
        (torch.optim.Rprop, {}),
    ],
)
def test_the_size_of_a_state_is_estimated(kind: Any, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100), nn.Linear(100, 10).bfloat16())
    model[2].weight.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    before = estimated_bytes([model, optimizer, object()])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    real = encode({"model": model.state_dict(), "optimizer": optimizer.state_dict()}).layout.total_bytes
    assert abs(before - real) < 64 * 20  # the estimate leaves out only scalars
    assert abs(estimated_bytes([model, optimizer]) - real) < 64


def test_an_unknown_optimizer_counts_with_its_present_state() -> None:
    class Own(torch.optim.Optimizer):
        pass

    model = nn.Linear(100, 100)
    assert estimated_bytes([Own(model.parameters(), {})]) == 0
    assert estimated_bytes([type("Mine", (torch.optim.AdamW,), {})(model.parameters())]) == 2 * (40_000 + 448)


def test_existing_files_of_the_job_count_as_available(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free", lambda _: 1_000_000)
    model = nn.Linear(1000, 100)
    file = SlotFile(shm / "checkpoint-0")
    with pytest.raises(
        CheckpointError, match=r"on m3: 2 ranks .* need 2\.8 MB .* but /dev/shm has 1\.0 MB\. .*estimate"
    ):
        check_room([model], file, ranks=2, backup_slots=0, where="m3")
    for name in ("checkpoint-1", "backup-7"):
        with (shm / name).open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, 1_000_000)
    check_room([model], file, ranks=2, backup_slots=0, where="m3")
    with pytest.raises(CheckpointError, match=r"3 slots and 2 for a backup need"):
        check_room([model], file, ranks=2, backup_slots=2, where="m3")


def test_as_many_slots_as_fit_are_used(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 100)  # 0.4 MB; a slot has somewhat more
    for room, slots in ((2_500_000, 5), (2_000_000, 4), (1_600_000, 3)):
        monkeypatch.setattr(memory_check, "free", lambda _, room=room: room)
        file = SlotFile(shm / f"checkpoint-{slots}", slots=5)
        if slots == 5:
            check_room([model], file, ranks=1, backup_slots=0, where="m3")
        else:
            with pytest.warns(
                RuntimeWarning, match=rf"room for {slots} slots instead of 5: no room .* {slots + 1} slots"
            ):
                check_room([model], file, ranks=1, backup_slots=0, where="m3")
        for step in range(1, 8):
            file.begin(b"", 400_000)
            file.commit(step)
        assert sorted(slot.completed_steps for slot in held(file.path)) == [*range(8 - slots, 8)]
        file.close()
        file.path.unlink()  # what the job's files have counts as free
    monkeypatch.setattr(memory_check, "free", lambda _: 1_300_000)
    with pytest.raises(CheckpointError, match="3 slots need"):
        check_room([model], SlotFile(shm / "checkpoint-2", slots=5), ranks=1, backup_slots=0, where="m3")


def test_the_loop_is_not_entered_without_room(start_rank: Any, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_available", lambda: 10_000)
    monkeypatch.setenv(environment.MACHINE, "m3")
    monkeypatch.setenv(environment.BACKUP_SLOTS, "2")
    start_rank()
    run, model = everstep.join(), nn.Linear(10, 10)
    with pytest.raises(CheckpointError, match=r"no room for checkpoints on m3: 1 ranks .* but 0\.0 MB of memory are"):
        next(run.steps(1, run.checkpoint(model=model)))
    assert list(shm.glob("checkpoint*")) == []
