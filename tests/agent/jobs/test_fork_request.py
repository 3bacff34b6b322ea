"""What a launch may request: the working folder of ranks, and whether saves overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.jobs.fork_request import check_launch, checkpoint_environment, folder_to_work_in
from agent.v1 import agent_pb2 as pb
from everstep.errors import ConfigError
from everstep.rank import environment


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").touch()
    return tmp_path / "code/train.py"


def launch(script: Path, cwd: str, *, by_default: bool) -> pb.LaunchRequest:
    program = pb.Program(script=str(script), cwd=cwd, cwd_by_default=by_default)
    return pb.LaunchRequest(ranks=[pb.RankLaunch(rank=0)], program=program)


def test_a_folder_that_nobody_named_need_not_be_on_every_machine(script: Path, tmp_path: Path) -> None:
    """A default folder may be missing on a machine."""
    there = launch(script, str(tmp_path), by_default=True)
    assert folder_to_work_in(there.program, script) == str(tmp_path)
    gone = launch(script, "/home/ada/gpt", by_default=True)
    check_launch(gone)
    assert folder_to_work_in(gone.program, script) == str(script.parent)
    assert folder_to_work_in(launch(script, "", by_default=False).program, script) == str(script.parent)


def test_a_folder_that_somebody_named_has_to_be_there(script: Path) -> None:
    with pytest.raises(ConfigError, match="cwd /home/ada/gpt is not a folder on this machine"):
        check_launch(launch(script, "/home/ada/gpt", by_default=False))


@pytest.mark.parametrize(("by_policy", "by_env", "told"), [(True, "", "1"), (True, "0", "0"), (False, "", "0")])
def test_a_job_turns_the_overlap_of_saves_off(tmp_path: Path, by_policy: bool, by_env: str, told: str) -> None:
    """The policy can turn it off. So can the job's environment, as a warning says when an overlapping save fails."""
    env = {environment.CHECKPOINT_OVERLAP: by_env} if by_env else {}
    request = pb.LaunchRequest(program=pb.Program(env=env), checkpoint=pb.CheckpointOptions(overlap=by_policy))
    assert checkpoint_environment(request, tmp_path)[environment.CHECKPOINT_OVERLAP] == told
