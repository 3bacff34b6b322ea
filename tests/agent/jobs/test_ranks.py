"""Ranks are launched. They end or are stopped, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from agent.jobs.host import socket_environment
from agent.launcher.rank_process import BESIDE
from agent.state.job_record import FILE, JobRecord
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, ConfigError, Fenced
from tests.agent.agents import HOST, Job, RunningAgent, alive, prepared, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLEEP = "import time; time.sleep(1000)"
FAMILY = """
import os, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
pids = [subprocess.Popen(["sleep", "1000"], start_new_session=apart).pid for apart in (False, True)]
child = os.fork()
if child == 0:
    grandchild = os.fork()
    if grandchild == 0:
        time.sleep(1000)
    with open(f"{here}/family-{os.environ['RANK']}", "a") as file:
        file.write(f"{grandchild}\\n")
    time.sleep(1000)
with open(f"{here}/family-{os.environ['RANK']}", "a") as file:
    file.write("".join(f"{pid}\\n" for pid in (*pids, child)))
time.sleep(1000)
"""


async def test_ends_are_reported_with_their_cause(agent: RunningAgent) -> None:
    script = """
import os, signal, sys
match os.environ["RANK"]:
    case "0": raise ValueError("no good")
    case "1": os.kill(os.getpid(), signal.SIGSEGV)
    case "2": sys.exit(7)
    case "3": sys.exit("told so")
"""
    job = await prepared(agent, script, ranks=5)
    reply = await job.launch()
    seen = {o.rank_ended.rank: o for o in await job.exits(5)}
    ends = {rank: (o.rank_ended.exit.kind, o.rank_ended.exit.value) for rank, o in seen.items()}
    code, number = pb.Exit.CODE, pb.Exit.SIGNAL
    assert ends == {0: (code, 1), 1: (number, signal.SIGSEGV), 2: (code, 7), 3: (code, 1), 4: (code, 0)}
    assert seen[0].rank_ended.exception == "ValueError: no good"
    assert seen[0].id == f"m1-{seen[0].sequence}"
    assert {r.rank: r.pid for r in reply.ranks} == {rank: o.rank_ended.pid for rank, o in seen.items()}
    assert b"told so" in await job.log(3, pb.ReadLogRequest.STDERR)
    evidence = await job.stop()
    assert [rank.exception for rank in evidence.ranks] == ["ValueError: no good", "", "", "", ""]
    assert "raise ValueError" in evidence.ranks[0].log_tail
    assert not any(rank.stopped_by_us for rank in evidence.ranks)
    assert not any(o.rank_ended.log_tail for o in seen.values())
    for rank in evidence.ranks:
        rank.log_tail = ""
        assert rank == seen[rank.rank].rank_ended, "the stop's answer describes the rank's end as the observation does"
    assert evidence.ranks[0].classification.reason == "user-exception"
    await job.release()


async def test_a_rank_has_torchruns_environment(agent: RunningAgent) -> None:
    script = """
import json, os, random, sys, threading
import helper
import numpy, torch
leads = os.getsid(0) == os.getpid()
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["RANK"], os.environ["MINE"], __name__, leads]))
print("EVERSTEP_AGENT_TOKEN_FILE" in os.environ, len(os.listdir("/proc/self/fd")) < 10, torch.get_num_threads())
print(numpy.random.rand(), torch.rand(1).item(), random.random())
"""
    job = await prepared(agent, script, ranks=2, args=("--steps", "3"))
    (agent.folder / "helper.py").write_text("")
    request = job.launch_request()
    request.program.env.update({"MINE": "yes", "OMP_NUM_THREADS": "2"})
    await agent.client.launch(request)
    await job.exits(2)
    said = [(await job.log(rank, pb.ReadLogRequest.STDOUT)).decode().splitlines() for rank in (0, 1)]
    assert said[0][0] == f'[["--steps", "3"], "{agent.folder}", "0", "yes", "__main__", true]'
    assert said[0][1] == "False True 2"
    numbers = [number for rank in said for number in rank[2].split()]
    assert len(set(numbers)) == 6, "unseeded ranks must not draw the same numbers"
    await job.release()


async def test_the_agent_knows_which_interfaces_its_ranks_use(agent: RunningAgent) -> None:
    job = await prepared(agent, "", ranks=1)
    await job.launch()
    await job.exits(1)
    saved = [path for path in (*agent.shm.rglob(FILE), *agent.state.rglob(FILE)) if job.name in str(path)]
    network = JobRecord.model_validate_json(saved[0].read_text()).network
    assert network == socket_environment(HOST)
    await job.release()


async def test_a_dead_rank_leaves_no_processes(agent: RunningAgent) -> None:
    job = await prepared(agent, FAMILY, ranks=2)
    ranks = (await job.launch()).ranks
    files = [agent.folder / f"family-{rank}" for rank in (0, 1)]
    await until(lambda: all(f.exists() and len(f.read_text().split()) == 4 for f in files), "both families run")
    mine, other = ([int(pid) for pid in f.read_text().split()] for f in files)
    os.kill(ranks[0].pid, signal.SIGKILL)
    await job.exits(1)
    await until(lambda: not any(map(alive, [ranks[0].pid, *mine])), "the family of rank 0 is gone, zombies included")
    assert all(map(alive, [ranks[1].pid, *other])), "the family of rank 1 must live"
    await job.stop()
    assert not any(map(alive, [ranks[1].pid, *other])), "Stop returns only when all processes are gone"
    await job.release()


async def test_a_repeated_request_has_no_second_effect(agent: RunningAgent) -> None:
    job = await prepared(agent, SLEEP)
    first = await job.launch()
    assert await job.launch() == first
    assert await job.launch(request_id="another") == first, "the same generation is never forked twice"
    stopped = await job.stop()
    assert {rank.pid for rank in stopped.ranks} == {rank.pid for rank in first.ranks}
    assert all(rank.stopped_by_us and rank.exit.value == signal.SIGKILL for rank in stopped.ranks)
    second = await job.launch(2)
    again = await job.stop()
    assert again.now_ns > stopped.now_ns, "the repeated answer has the time of its own"
    again.now_ns = stopped.now_ns
    assert again == stopped, "a repeated Stop(1) must not touch generation 2"
    assert all(alive(rank.pid) for rank in second.ranks)
    await job.release()


async def test_a_stopped_generation_cannot_start(agent: RunningAgent) -> None:
    job = await prepared(agent, SLEEP)
    await job.stop(3)
    for generation in (1, 3):
        with pytest.raises(Fenced, match=f"generation {generation} of .* was stopped"):
            await job.launch(generation)
        with pytest.raises(Fenced):
            await agent.client.start_store(pb.StartStoreRequest(job=job.name, generation=generation))
    assert len((await job.launch(4)).ranks) == 2
    with pytest.raises(AgentError, match="still lives"):
        await job.launch(5)
    await job.release()


async def test_a_late_stop_of_an_older_generation_lowers_no_fence(agent: RunningAgent) -> None:
    job = await prepared(agent, SLEEP)
    await job.stop(3)
    await job.stop(1)
    with pytest.raises(Fenced, match=r"generation 2 of .* was stopped"):
        await job.launch(2)
    assert len((await job.launch(4)).ranks) == 2
    await job.release()


async def test_a_rank_that_runs_twice_reports_it(agent: RunningAgent) -> None:
    job = await prepared(agent, SLEEP)
    folder = agent.shm / job.name
    folder.mkdir(mode=0o700, exist_ok=True)
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); time.sleep(60)"
    arguments = (sys.executable, "-u", "-c", hold, str(folder / "rank-1.lock"))
    other = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert other.stdout is not None and await other.stdout.readline() == b"\n"
        await job.launch()
        await job.entered()
        logs = [(await job.log(rank, pb.ReadLogRequest.STDERR)).decode() for rank in (0, 1)]
    finally:
        other.kill()
        await other.wait()
    assert [BESIDE in log for log in logs] == [False, True]
    await job.release()


async def test_a_fence_holds_before_the_first_prepare(agent: RunningAgent) -> None:
    job = Job(agent, SLEEP)
    with pytest.raises(AgentError, match="is not prepared on"):
        await job.launch()
    await job.stop(1)
    await job.prepare()
    with pytest.raises(Fenced):
        await job.launch(1)
    await job.release()


async def test_a_late_launch_of_a_released_job_is_refused(agent: RunningAgent) -> None:
    job = await prepared(agent, SLEEP)
    await job.release()
    with pytest.raises(AgentError, match="is over on"):
        await job.launch(1)


async def test_with_a_grace_period_ranks_can_end_by_themselves(agent: RunningAgent) -> None:
    script = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("ready", flush=True)
time.sleep(1000)
"""
    job = await prepared(agent, script, ranks=1)
    await job.launch()
    log = agent.state / "jobs" / job.name / "logs" / "rank-0.out"
    await until(lambda: log.exists() and b"ready" in log.read_bytes(), "the handler is installed")
    rank = (await job.stop(grace_s=20)).ranks[0]
    assert (rank.exit.kind, rank.exit.value, rank.stopped_by_us) == (pb.Exit.CODE, 3, True)
    await job.release()


async def test_a_store_serves_only_its_generation(agent: RunningAgent) -> None:
    script = """
import os, sys
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False)
rank = os.environ["RANK"]
store.set(rank, "here " + rank)
print(store.get(str(1 - int(rank))).decode())
"""
    job = await prepared(agent, script)
    request = pb.StartStoreRequest(request_id="store", job=job.name, generation=1)
    store = await agent.client.start_store(request)
    assert await agent.client.start_store(request) == store
    launch = job.launch_request()
    launch.program.env.update({"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)})
    await agent.client.launch(launch)
    assert [o.rank_ended.exit.value for o in await job.exits(2)] == [0, 0]
    assert await job.log(0, pb.ReadLogRequest.STDOUT) == b"here 1\n"
    assert alive(store.pid)
    await job.stop()
    assert not alive(store.pid)
    fresh = await agent.client.start_store(pb.StartStoreRequest(job=job.name, generation=2))
    assert fresh.pid != store.pid
    await job.release()
    assert not alive(fresh.pid)


async def test_a_planned_fault_fires_once_in_a_plain_script(agent: RunningAgent) -> None:
    script = """
import torch
parameter = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(5):
    print("step", step, flush=True)
    parameter.grad = torch.ones(3)
    optimizer.step()
"""
    job = await prepared(agent, script, ranks=1)
    plan = agent.folder / "plan.json"
    plan.write_text('[{"id": "one", "fault": "kill-rank", "rank": 0, "at_step": 2, "signal": "ABRT"}]')
    for generation, end in ((1, (pb.Exit.SIGNAL, signal.SIGABRT)), (2, (pb.Exit.CODE, 0))):
        request = job.launch_request(generation)
        request.program.env["EVERSTEP_FAULTS"] = str(plan)
        await agent.client.launch(request)
        exited = (await job.exits(generation))[-1].rank_ended
        assert (exited.exit.kind, exited.exit.value) == end
        ranks = (await agent.client.describe()).jobs[0].ranks
        assert [rank.optimizer_steps for rank in ranks] == [2 if generation == 1 else 5]
        await job.stop(generation)
    await job.release()


@pytest.mark.parametrize(
    ("script", "exception", "reason"),
    [
        ("import nonsuch_module", "ModuleNotFoundError: No module named 'nonsuch_module'", "dependency-missing"),
        ("this is not", "SyntaxError: invalid syntax", "user-exception"),
    ],
)
async def test_an_error_of_a_script_is_reported(agent: RunningAgent, script: str, exception: str, reason: str) -> None:
    job = await prepared(agent, script, ranks=1)
    await job.launch()
    assert (await job.exits(1))[0].rank_ended.exception == exception
    assert exception in (await job.log(0, pb.ReadLogRequest.STDERR, tail=200)).decode()
    [ended] = (await job.stop()).ranks
    assert (ended.classification.owner, ended.classification.reason) == ("code", reason)
    await job.release()


async def test_an_impossible_launch_is_refused_before_a_fork(agent: RunningAgent) -> None:
    job = await prepared(agent, SLEEP)
    job.path.unlink()
    with pytest.raises(ConfigError, match="is not a file on this machine"):
        await job.launch()
    request = job.launch_request()
    request.program.script, request.program.cwd = __file__, "/nonsuch"
    with pytest.raises(ConfigError, match="cwd /nonsuch"):
        await agent.client.launch(request)
    with pytest.raises(ConfigError, match="is not a job name"):
        await agent.client.prepare(pb.PrepareRequest(job="../up"))
    with pytest.raises(AgentError, match="cannot be started"):
        await agent.client.prepare(pb.PrepareRequest(job="strange", python="/nonsuch/python"))
    await agent.client.release(pb.ReleaseRequest(job="strange"))
    await job.release()


async def test_a_release_frees_everything_except_the_logs(agent: RunningAgent) -> None:
    job = Job(agent, "print('kept', flush=True)\n" + SLEEP)
    reply = await agent.client.prepare(pb.PrepareRequest(job=job.name, env={"MINE": "1"}))
    ranks = (await job.launch()).ranks
    await job.entered()
    (agent.shm / job.name / "checkpoint-0").write_bytes(bytes(1 << 20))
    log = agent.state / "jobs" / job.name / "logs" / "rank-0.out"
    await until(lambda: b"kept" in log.read_bytes(), "the output is in the log")
    assert (await job.release()).bytes_freed >= 1 << 20
    assert not any(alive(pid) for pid in (reply.fork_server_pid, *(rank.pid for rank in ranks)))
    assert not agent.left()
    assert await job.log(0, pb.ReadLogRequest.STDOUT) == b"kept\n"
    with pytest.raises(AgentError, match="is over on"):
        await job.launch(2, "late")
    await job.prepare()  # a later job of this name starts from the beginning
    assert {rank.pid for rank in (await job.launch()).ranks}.isdisjoint(rank.pid for rank in ranks)
    await job.release()
    assert Path(log).parent.exists()


async def test_commands_that_waited_while_the_job_ended_have_no_effect(agent: RunningAgent) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
    job = await prepared(agent, deaf + SLEEP, ranks=1)
    await job.launch()
    await job.entered()
    log = agent.state / "jobs" / job.name / "logs" / "rank-0.out"
    await until(lambda: b"deaf" in log.read_bytes(), "the ranks ignore SIGTERM")
    stopping = asyncio.create_task(job.stop(grace_s=1.0))
    await asyncio.sleep(0.2)
    releasing = asyncio.create_task(job.release())
    await asyncio.sleep(0.2)
    late = (
        job.launch(2, "late"),
        agent.client.prepare(pb.PrepareRequest(request_id="late", job=job.name), timeout_s=60),
        agent.client.restore(pb.RestoreRequest(request_id="late", job=job.name), timeout_s=60),
    )

    answers = await asyncio.gather(*late, return_exceptions=True)

    await asyncio.gather(stopping, releasing)
    for answer in answers:
        assert isinstance(answer, AgentError)
        assert "is over on" in str(answer)
    assert job.name not in {one.job for one in (await agent.client.describe()).jobs}
    assert not (agent.shm / job.name).exists()


async def test_a_rank_may_start_cuda_and_has_torch_at_once(agent: RunningAgent) -> None:
    """Without a GPU, this shows only that the fork server neither initialized CUDA nor loaded the driver."""
    script = """
import sys
preloaded = {"torch._dynamo", "torch.distributed.pipelining", "everstep.training.run"}
loaded = preloaded & set(sys.modules)
import torch
print(len(loaded), torch.cuda._is_in_bad_fork())
print("libcuda.so" in open("/proc/self/maps").read())
"""
    job = await prepared(agent, script, ranks=1)
    await job.launch()
    assert (await job.exits(1))[0].rank_ended.exit.value == 0
    assert await job.log(0, pb.ReadLogRequest.STDOUT) == b"3 False\nFalse\n"
    await job.release()
