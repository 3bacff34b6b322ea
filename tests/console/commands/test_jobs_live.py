"""The commands on jobs run as processes, on a real local cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.client import Control
from controlplane.local import cluster as local
from everstep.model.job_state import JobState

pytestmark = [pytest.mark.drill, pytest.mark.timeout(240)]

SCRIPT = """
import sys, time
import everstep

run = everstep.join()
print(f"hello from rank {run.rank}", flush=True)
for step in run.steps(int(sys.argv[1])):
    time.sleep(0.05)
    run.report(step, loss=1.0 / (step + 1), tokens=10)
"""
SAVING = """
import pathlib, sys, time
import everstep

class Count:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

def written(step):
    return pathlib.Path(f"disk/saving/step-{step:09d}/rank-{run.rank}.json")

run, count = everstep.join(), Count()
for step in run.steps(int(sys.argv[1]), run.checkpoint(count=count)):
    if count.value != step:
        raise SystemExit(f"{count.value} steps were restored, and this is step {step}")
    if not count.value or step == 20:
        print(f"begins with step {step}", flush=True)
    count.value += 1
    waits_for = {10: written(10), 20: written(20), 25: pathlib.Path("go")}.get(step)
    while waits_for and not waits_for.exists():
        time.sleep(0.05)
    run.report(step, loss=1.0)
"""
SAVING_JOB = """
name = "saving"
script = "saving.py"
args = ["30"]
machines = 2
[checkpoint]
disk_path = "disk"
disk_every_steps = 10
disk_keep = 5
"""
DRAWING = """
import sys, time
import torch
import everstep

class Model:
    weight = torch.zeros(2, dtype=torch.float64)
    def state_dict(self): return {"weight": self.weight, "drawn": torch.get_rng_state()}
    def load_state_dict(self, state):
        self.weight = state["weight"]
        torch.set_rng_state(state["drawn"])

torch.manual_seed(7)
run, model = everstep.join(), Model()
for step in run.steps(int(sys.argv[1]), run.checkpoint(model=model)):
    error = model.weight - torch.rand(2, dtype=torch.float64)
    model.weight = model.weight - RATE * error
    loss = float(error @ error)
    print(step, loss.hex(), flush=True)
    run.report(step, loss=loss)
    time.sleep(PAUSE)
"""
DRAWING_JOB = """
name = "drawing"
script = "drawing/train.py"
args = ["100000"]
machines = 2
[checkpoint]
disk_path = "disk"
disk_every_steps = 20
disk_keep = 100
"""
MENDABLE = """
import pathlib
import everstep

class Count:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

run, count = everstep.join(), Count()
for step in run.steps(20, run.checkpoint(count=count)):
    if step == count.value and step in (0, 12):
        print(f"begins with step {step}", flush=True)
    if step == 12 and not pathlib.Path("mended").exists():
        raise ValueError("not mended yet")
    count.value += 1
    run.report(step, loss=1.0)
"""
MENDABLE_JOB = """
name = "mendable"
script = "mendable.py"
machines = 2
[policy.retry]
max_attempts = 1
[checkpoint]
disk = false
"""
Everstep = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of two machines in a separate everstep home."""
    home = tmp_path_factory.mktemp("home")
    (home / "train.py").write_text(SCRIPT)
    (home / "saving.py").write_text(SAVING)
    (home / "saving.toml").write_text(SAVING_JOB)
    (home / "mendable.py").write_text(MENDABLE)
    (home / "mendable.toml").write_text(MENDABLE_JOB)
    (home / "disk").mkdir()
    (home / "drawing").mkdir()
    (home / "drawing.toml").write_text(DRAWING_JOB)
    (home / "broken.py").write_text("import everstep\nimport no_such_module\n")
    patch = pytest.MonkeyPatch()
    patch.setenv("EVERSTEP_HOME", str(home))
    local.up(machines=2, standbys=0)
    yield home
    local.down(purge=True)
    patch.undo()


@pytest.fixture
def everstep(home: Path) -> Iterator[Everstep]:
    """Starts a command of everstep."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "console.main", *arguments],
            env=os.environ | {"EVERSTEP_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def job(everstep: Everstep, name: str) -> dict[str, Any]:
    code, out, err = outcome(everstep("status", name, "--json"))
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def await_state(name: str, holds: Callable[[JobState], bool]) -> None:
    """Wait for a state of a job. The test asks the cluster directly, since each command needs a second of CPU."""

    async def ask() -> None:
        async with asyncio.timeout(100), await Control.connect() as control:
            while not holds(await control.state(name)):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.2)

    asyncio.run(ask())


def test_run_follows_a_job_to_its_end_and_its_logs_stay(everstep: Everstep, home: Path) -> None:
    script = str(home / "train.py")
    code, out, err = outcome(everstep("run", "--json", "--name", "short", "--machines", "2", "--", script, "40"))
    assert code == 0, err
    # On a busy computer, a note about the progress of the snapshot may come first.
    rows = [row for row in map(json.loads, out.splitlines()) if row["event"] != "note"]
    assert (rows[0]["event"], rows[0]["world_size"]) == ("started", 2)
    assert rows[-1]["outcome"] == "finished"
    assert rows[-1]["facts"]["steps"] == 40
    assert rows[-1]["facts"]["loss"] == pytest.approx(1 / 40)
    assert rows[-1]["facts"]["incidents"] == 0
    code, out, _ = outcome(everstep("logs", "short", "--stream", "stdout"))
    assert (code, out.splitlines()) == (0, ["r0| hello from rank 0", "r1| hello from rank 1"])
    assert job(everstep, "short")["step"] == 40
    assert outcome(everstep("stop", "short"))[0] == 2
    assert "did you mean short" in outcome(everstep("status", "shirt"))[2]


def test_a_job_outlives_its_followers_and_recovers_before_their_eyes(everstep: Everstep, home: Path) -> None:
    script = str(home / "train.py")
    first = everstep("run", "--name", "long", "--machines", "2", "--", script, "100000")
    assert first.stdout is not None
    for line in first.stdout:
        if "step 1" in line:
            break
    first.kill()
    first.wait()
    second = everstep("attach", "long", "--json")
    assert second.stdout is not None
    for line in second.stdout:
        if json.loads(line)["event"] == "progress":
            break  # the command follows the job now
    victim = job(everstep, "long")["machines"][1]["ranks"][0]["pid"]
    os.kill(victim, signal.SIGKILL)
    kinds = []
    for line in second.stdout:
        row = json.loads(line)
        if row["event"] == "incident":
            kinds.append(row["kind"])
            if row["kind"] == "recovered":
                break
    assert kinds == ["opened", "recovered"]
    second.send_signal(signal.SIGINT)
    code, out, err = outcome(second)
    assert (code, json.loads(out.splitlines()[-1])["outcome"]) == (130, "detached"), err
    assert outcome(everstep("run", "--name", "long", "--", script, "1"))[0] == 2  # the job already runs
    following = everstep("logs", "long", "-f", "--rank", "1", "--stream", "stdout")
    assert following.stdout is not None
    assert following.stdout.readline() == "hello from rank 1\n"
    assert following.stdout.readline() == "hello from rank 1\n"  # this line is of the second generation
    code, _, err = outcome(everstep("stop", "long", "--note", "enough"))
    assert code == 0, err
    assert following.wait(timeout=60) == 0  # the logs have ended
    assert job(everstep, "long")["status"] == "stopped"


def test_a_script_that_fails_at_import_is_parked_with_its_traceback(everstep: Everstep, home: Path) -> None:
    code, out, err = outcome(everstep("run", "--name", "broken", "--machines", "2", "--", str(home / "broken.py")))
    assert code == 4, err
    assert "ModuleNotFoundError: No module named 'no_such_module'" in out
    assert "everstep logs broken --rank" in out
    assert "everstep resume broken" in out
    code, out, err = outcome(everstep("status", "broken"))
    assert "parked: it needs an operator" in out
    # The job runs the recorded version. A repair of the file is not enough, but an urgent update is.
    (home / "broken.py").write_text(SCRIPT.replace("int(sys.argv[1])", "20"))
    code, out, err = outcome(everstep("update", "broken", "--code", str(home), "--urgent", "--reason", "mended"))
    assert code == 0, f"{out}{err}"
    await_state("broken", lambda state: state.status == "finished")
    assert [one["status"] for one in json.loads(outcome(everstep("versions", "broken", "--json"))[1])][-1] == "running"


def test_a_parked_job_can_be_given_up(everstep: Everstep, home: Path) -> None:
    (home / "hopeless.py").write_text("import everstep\nraise SystemExit('no data')\n")
    (home / "hopeless.toml").write_text(
        'name = "hopeless"\nscript = "hopeless.py"\nmachines = 2\npolicy.ladder.modes.diagnose = "off"\n'
    )
    assert outcome(everstep("run", str(home / "hopeless.toml")))[0] == 4
    assert outcome(everstep("abandon", "hopeless/7"))[0] == 2
    code, _, err = outcome(everstep("abandon", "hopeless/1", "--note", "no data"))
    assert code == 0, err
    found = job(everstep, "hopeless")
    assert found["status"] == "failed"
    assert found["open_incident"] is None
    assert [rank["alive"] for machine in found["machines"] for rank in machine["ranks"]].count(True) == 0


def test_a_job_whose_incident_is_terminated_keeps_its_memory_and_goes_on_from_it(
    everstep: Everstep, home: Path
) -> None:
    """There are no copies on disk. If the memory had been freed, the job would begin with step 0."""
    code, _, err = outcome(everstep("run", str(home / "mendable.toml")))
    assert code == 4, err
    # The ranks do not wait for each other. If one was behind, the first incident recovers, and the second one parks.
    number = len(job(everstep, "mendable")["incidents"])
    incident = f"incident/mendable/{number:04d}"

    async def terminate() -> None:
        async with await Control.connect() as control:
            await control.client.get_workflow_handle(incident).terminate(reason="out of the way")

    asyncio.run(terminate())
    await_state("mendable", lambda state: state.incident_count == number + 1 and state.status == "parked")
    found = job(everstep, "mendable")
    assert "out of the way" in found["incidents"][number - 1]["headline"]
    listed = json.loads(outcome(everstep("incidents", "mendable", "--json"))[1])
    assert [one["resolution"] for one in listed][:2] == [None, "closed from outside"]
    assert f"{incident} was terminated" in outcome(everstep("status", "mendable"))[1]
    (home / "mended").touch()
    code, _, err = outcome(everstep("resume", "mendable"))
    assert code == 0, err
    await_state("mendable", lambda state: state.status == "finished")
    _, out, _ = outcome(everstep("logs", "mendable", "--rank", "1", "--stream", "stdout"))
    begun = out.splitlines()
    assert (begun[0], begun[-1]) == ("begins with step 0", "begins with step 12")
    assert begun.count("begins with step 0") == 1


def test_checkpoints_are_listed_and_a_job_that_has_ended_goes_on_from_one(everstep: Everstep, home: Path) -> None:
    path = str(home / "saving.toml")
    first = everstep("run", path, "--json")
    assert first.stdout is not None
    for line in first.stdout:
        if (json.loads(line).get("step") or 0) >= 25:
            break
    code, out, err = outcome(everstep("checkpoints", "saving", "--json", "--verify"))
    assert code == 0, err
    living = json.loads(out)
    assert {10, 20, 25} <= {*living["restorable"]}
    assert next(step for step in living["steps"] if step["step"] == 25)["ranks"]["own memory"] == 2
    assert living["backup_machines"] == {"m0": "m1", "m1": "m0"}
    (home / "go").touch()
    assert outcome(first)[0] == 0

    code, out, err = outcome(everstep("checkpoints", "saving", "--json"))
    assert code == 0, err
    ended = json.loads(out)
    assert {10, 20} <= {*ended["restorable"]} <= {10, 20, 30}
    assert ended["steps"][-1]["ranks"] == {"own memory": 0, "backup": 0, "disk": 2, "remote": 0}

    code, _, err = outcome(everstep("run", path, "--resume-from", "25"))
    assert code == 2
    assert "step 25 cannot be restored by all 2 ranks: no rank has it; there are steps " in err
    code, _, err = outcome(everstep("run", path, "--machines", "1", "--resume-from", "20"))
    assert code == 2
    assert "saved with other sizes" in err

    code, out, err = outcome(everstep("run", path, "--resume-from", "20"))
    assert code == 0, err
    assert "step 20 was requested, and all 2 ranks can restore: all 2 from disk (m0, m1)" in out
    code, out, _ = outcome(everstep("logs", "saving", "--stream", "stdout", "--rank", "0"))
    assert out.splitlines()[-1] == "begins with step 20"


@pytest.mark.wide
def test_steps_are_repeated_bit_for_bit_with_the_code_that_ran_them(everstep: Everstep, home: Path) -> None:
    """The code changes while the job runs, and is gone when the steps are repeated."""
    path, script = str(home / "drawing.toml"), home / "drawing/train.py"
    script.write_text(DRAWING.replace("RATE", "0.1").replace("PAUSE", "0.1"))
    assert outcome(everstep("run", path, "--detach"))[0] == 0
    await_state("drawing", lambda state: state.status == "running")
    script.write_text(DRAWING.replace("RATE", "0.3").replace("PAUSE", "0.002"))
    update = ("update", "drawing", "--code", str(script.parent), "--arg=600", "--urgent")
    code, out, err = outcome(everstep(*update))
    assert code == 0, f"{out}{err}"
    await_state("drawing", lambda state: state.status == "finished")
    script.unlink()

    begin = json.loads(outcome(everstep("versions", "drawing", "--json"))[1])[1]["ranges"][0][1]
    kept = json.loads(outcome(everstep("checkpoints", "drawing", "--json"))[1])["restorable"]
    resume = min(step for step in kept if step > begin)
    first = {step: loss for step, loss in losses(everstep).items() if step >= resume}
    code, _, err = outcome(everstep("run", path, "--version", "2", "--resume-from", str(resume + 1)))
    assert code == 2
    assert f"step {resume + 1} cannot be restored by all 2 ranks: no rank has it; there are steps " in err
    code, _, err = outcome(everstep("run", path, "--version", "7", "--resume-from", str(resume)))
    assert code == 2
    assert "the last run of drawing has no v7; there are v1 (" in err
    code, out, err = outcome(everstep("run", path, "--version", "2", "--resume-from", str(resume)))
    assert code == 0, f"{out}{err}"
    assert "code: v2 (" in out
    assert "do not repeat its steps" not in out
    again = losses(everstep)
    assert again == first
    assert (min(again), len(again)) == (resume, 600 - resume)


def losses(everstep: Everstep) -> dict[int, str]:
    """Return step → loss in the newest run of the job, from the output of rank 1."""
    _, out, _ = outcome(everstep("logs", "drawing", "--rank", "1", "--stream", "stdout"))
    return {int(step): loss for step, loss in map(str.split, out.splitlines())}
