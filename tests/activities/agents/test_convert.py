"""A job's settings are converted to messages for agents, and the agents' answers are converted from messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from activities.agents.convert import (
    backup_peers,
    checkpoint_options,
    import_environment,
    rank_launches,
    shared_environment,
)
from everstep.decisions.keep.placement import place_backups
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

PROGRAM = """
import json, os, sys
json.dump(dict(os.environ), open(f"{sys.argv[1]}/{os.environ['RANK']}", "w"))
"""
OF_ITS_OWN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""Variables that only torchrun's launcher needs, or that torchrun sets to torch's default."""


def test_a_rank_gets_every_variable_that_torchrun_sets(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=100,
        env=(given := {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}),
    )
    theirs = json.loads((tmp_path / "1").read_text())
    spec = JobSpec(name="job", script="/job.py", machines=1, ranks_per_machine=2)
    ours = shared_environment(spec, "127.0.0.11", 29500, 1) | dict(rank_launches(spec, 0)[1].env)

    set_by_torchrun = {name for name in theirs if name not in given} - OF_ITS_OWN
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} <= set_by_torchrun
    assert set_by_torchrun - {"LC_CTYPE"} <= ours.keys()  # Python itself sets LC_CTYPE
    numbers = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"]
    same = [*numbers, "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"]
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


def test_ranks_of_a_machine_are_consecutive() -> None:
    spec = JobSpec(name="job", script="/job.py", machines=4, ranks_per_machine=2, tp=2, pp=2)

    launches = rank_launches(spec, 2)

    names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    assert [tuple(launch.env[name] for name in names) for launch in launches] == [("4", "0", "2"), ("5", "1", "2")]


def test_only_what_is_read_at_import_makes_a_fork_server_of_its_own() -> None:
    """Only a variable that is read at import needs a separate fork server."""
    spec = JobSpec(name="job", script="/job.py", env={"PYTHONHASHSEED": "0", "LR": "1", "NCCL_DEBUG": "INFO"})

    assert import_environment(spec) == {"PYTHONHASHSEED": "0"}


def test_a_users_variable_wins_over_a_default_but_not_over_torchruns() -> None:
    spec = JobSpec(name="job", script="/job.py", env={"OMP_NUM_THREADS": "4", "WORLD_SIZE": "99"})

    found = shared_environment(spec, "h", 1, 1)

    assert (found["OMP_NUM_THREADS"], found["WORLD_SIZE"]) == ("4", "1")


def test_each_machine_is_told_where_the_backups_of_its_ranks_go() -> None:
    spec = JobSpec(name="job", script="/job.py", machines=4, ranks_per_machine=2, tp=2, pp=2)
    machines = [Machine(name=f"m{index}", address=f"10.0.0.{index}:1") for index in range(4)]
    placement = place_backups(spec.topology())

    for index in range(4):
        peers = backup_peers(spec.assignment(machines), placement, index)
        assert [peer.rank for peer in peers] == [2 * index, 2 * index + 1]
        for peer in peers:
            assert peer.machine != f"m{index}"
            assert peer.address == f"10.0.0.{peer.machine[1:]}:1"
    alone = JobSpec(name="job", script="/job.py", ranks_per_machine=2)
    assert backup_peers(alone.assignment(machines[:1]), place_backups(alone.topology()), 0) == []


def test_agents_are_told_all_of_the_checkpoint_policy_that_is_theirs() -> None:
    """A new field of the policy must be sent to the agents, or be listed here as a field of the control plane."""
    options = {field.name for field in checkpoint_options(JobSpec(name="job", script="/job.py")).DESCRIPTOR.fields}

    ours = {"disk_every_min", "state_mb_per_rank", "max_unsaved_steps", "max_unsaved_s", "verify_at_stop_mb"}
    ours |= {"save_every_steps"}
    assert set(CheckpointPolicy.model_fields) - ours == options - {"reshard_from"}
