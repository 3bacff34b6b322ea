"""What a drill finally destroys, how many steps this may cost, and the line that describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drills.faults.all import drill_request
from drills.spec.loss import Loss, best_step, promise_of


@pytest.mark.parametrize(
    ("options", "strike", "promised", "said"),
    [
        # Machines m0 … m3 hold (pp0 dp0), (pp0 dp1), (pp1 dp0), (pp1 dp1): m0 and m3 are peers, and so are m1 and m2.
        (
            {"fault": "kill-machine", "machine": "m2"},
            Loss((2,)),
            1,
            "SIGKILL to all processes of m2, with loss of memory and disk",
        ),
        ({"fault": "kill-machine"}, Loss((3,)), 1, "all processes of m3"),
        ({"fault": "kill-group", "kind": "tp", "index": 1}, Loss((1,)), 1, "tp group 1: SIGKILL to all"),
        ({"fault": "kill-group", "kind": "pp"}, Loss((0, 2)), 1, "pp group 0: SIGKILL to all processes of m0 and m2"),
        ({"fault": "kill-group", "kind": "dp", "index": 2}, Loss((2, 3)), 1, "all processes of m2 and m3"),
        ({"fault": "flip-bit", "where": "buffer", "ranks": [5]}, Loss(ranks=(5,)), 1, "; then SIGKILL to rank 5"),
        ({"fault": "flip-bit", "where": "backup", "ranks": [5]}, Loss((2,)), 1, "backup on m1 at step 20; then"),
        (
            {"fault": "flip-bit", "where": "file", "ranks": [5]},
            Loss((1, 2)),
            None,
            "in its newest file on disk",
        ),
        ({"fault": "truncate-file", "ranks": [0]}, Loss((0, 3)), None, "of rank 0 is cut short"),
        ({"fault": "disk-full", "machine": "m1"}, Loss((1, 2), disks=False), None, "with loss of memory"),
        ({"fault": "shm-full"}, Loss(), 1, "shared memory of m3 has room for nothing"),
        ({"fault": "shm-full", "fits": "own", "machine": "m1"}, Loss((2,)), 1, "its own ranks only at step 20; then"),
        ({"fault": "hang-peer", "machine": "m1"}, Loss(), 1, "SIGSTOP to the agent of m1 for 6 s"),
        ({"fault": "kill-peer", "machine": "m1"}, Loss((2,)), 1, "the agent of m1 in the middle of a backup"),
        ({"fault": "kill-peer", "machine": "m0", "then": "kill-rank"}, Loss(ranks=(6,)), 1, "then SIGKILL to rank 6"),
        (
            {"fault": "kill-agent", "machine": "m1", "then": "kill-rank"},
            Loss(ranks=(2,)),
            1,
            "then SIGKILL to rank 2",
        ),
        (
            {"fault": "kill-agent", "machine": "m1", "then": "kill-machine"},
            Loss((1,)),
            1,
            "; then SIGKILL to all processes of m1",
        ),
        ({"fault": "kill-rank"}, Loss(), 1, "SIGKILL to rank 7 at step 20"),
        ({"fault": "link-down", "machine": "m1"}, Loss(), 1, "the link of m1 is down for 6 s at step 20"),
        ({"fault": "cut-off", "seconds": 9.0}, Loss(), 1, "m3 and the control host do not reach each other for 9 s"),
        ({"fault": "kill-postgres", "ranks": [2]}, Loss(ranks=(2,)), 1, "the ledger's server, which stays away"),
        ({"fault": "kill-workers"}, Loss(ranks=(7,)), 1, "away for 6 s at step 20; then SIGKILL to rank 7"),
        (
            {"fault": "kill-worker", "in_stage": "restore", "during": "kill-machine", "machine": "m0"},
            Loss((0,)),
            1,
            "all processes of m0, with loss of memory and disk at step 20, then SIGKILL to the worker at stage restore",
        ),
    ],
)
def test_each_strike_has_its_loss_its_promise_and_its_text(
    options: dict[str, Any], strike: Loss, promised: int | None, said: str
) -> None:
    request = drill_request(**options)
    spec = request.spec("job", {}, disk=Path("/disk"))
    assert request.opening.loss(spec) == strike
    assert promise_of(spec, strike).steps == promised
    assert said in request.describe(spec)


def test_with_one_kind_of_parallelism_a_group_is_the_complete_job() -> None:
    request = drill_request(fault="kill-group", kind="dp", machines=2, ranks_per_machine=1, tp=1, pp=1)
    spec = request.spec("job", {})
    assert request.opening.loss(spec) == Loss((0, 1))
    assert promise_of(spec, Loss((0, 1))).steps is None
    assert promise_of(spec, Loss((1,))).steps == 1


def test_without_backups_nothing_is_promised(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "job.toml"
    file.write_text('script = "train.py"\nmachines = 4\n[checkpoint]\nbackup = false\n')
    request = drill_request(fault="kill-machine", config=file)
    promise = promise_of(request.spec("job", {}), Loss((0,)))
    assert promise.steps is None and "no backups" in promise.reason


def test_the_best_step_is_the_newest_complete_step() -> None:
    assert best_step({0: {18, 19, 20}, 1: {19, 20}, 2: {15, 19}}) == 19
    assert best_step({0: {20}, 1: {19}}) == 0
    assert best_step({}) == 0
