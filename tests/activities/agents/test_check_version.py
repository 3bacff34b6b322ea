"""A version of the code is tried on the job's machines before the job runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.agents.check_version import CheckVersion, VersionChecked, judged
from activities.versions.snapshot import folder_snapshot
from activities.versions.store import VersionStore
from agent.client import AgentClients
from agent.fake import Answer, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, CodeMissing, ConfigError
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import CodeVersion
from tests.activities.performing import perform
from tests.activities.spoken import reached
from tests.agent.agents import running_agent

Outcome = pb.TryCodeReply
TRACE = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'x'\n(exit code 1)"
JOINED = Outcome(outcome=Outcome.JOINED)
FAILED = Outcome(outcome=Outcome.FAILED, text=TRACE)


def agent(answer: Answer, **answers: Answer) -> FakeAgent:
    """Return an agent that has the code and answers a trial with ``answer``."""
    has = lambda request: pb.HasCodeReply(digests=request.digests)  # noqa: E731
    return FakeAgent(try_code=answer, **({"has_code": has} | answers))


def policy(check_s: float) -> RecoveryPolicy:
    return RecoveryPolicy(update={"check_s": check_s})


async def checked(agents: Sequence[FakeAgent], *, silent: int = 0, store: VersionStore | None = None) -> VersionChecked:
    """Try a version on agents, and on ``silent`` machines that do not answer. Returns the result."""
    spec = JobSpec(
        name="gpt",
        script="job.py",
        code="0" * 64,
        machines=len(agents) + silent,
        ranks_per_machine=2,
        policy=policy(30.0),
    )
    async with reached(agents) as (pool, machines):
        away = [Machine(name=f"away{n}", address="127.0.0.1:1") for n in range(silent)]
        given = CheckVersion(job=PlacedJob(spec=spec, machines=[*machines, *away]), patience_s=0.3)
        return await perform(given, agents=pool, versions=store)


async def test_each_machine_is_its_own_first_rank() -> None:
    agents = [agent(JOINED) for _ in range(3)]
    assert await checked(agents) == VersionChecked()
    requests = [one.asked("try_code")[0] for one in agents]
    assert [request.program.env["RANK"] for request in requests] == ["0", "2", "4"]
    assert {request.program.env["WORLD_SIZE"] for request in requests} == {"6"}
    programs = {(request.program.code, request.program.script, request.timeout_s) for request in requests}
    assert programs == {("0" * 64, "job.py", 30.0)}


async def test_what_could_not_be_tried_is_told_once_and_refuses_nothing() -> None:
    """If some part could not be tried, the version is not refused for that. The text is reported once."""
    partly = Outcome(outcome=Outcome.JOINED, text="whether its sizes fit was not tried")
    found = await checked([agent(JOINED), agent(partly), agent(partly)])
    assert found == VersionChecked(told="whether its sizes fit was not tried")


async def test_a_machine_beyond_those_of_the_job_is_tried_as_one_of_them() -> None:
    standby = agent(JOINED)
    spec = JobSpec(name="gpt", script="job.py", machines=1, ranks_per_machine=2)
    async with reached([agent(JOINED), standby]) as (pool, machines):
        given = CheckVersion(job=PlacedJob(spec=spec, machines=machines))
        assert await perform(given, agents=pool, versions=None) == VersionChecked()
    assert standby.asked("try_code")[0].program.env["RANK"] == "0"


async def test_what_fails_is_refused_with_the_first_traceback_and_how_many_say_the_same() -> None:
    other = Outcome(outcome=Outcome.FAILED, text="OSError: no file\n(exit code 1)")
    found = await checked([agent(JOINED), agent(FAILED), agent(FAILED), agent(other)])
    assert found.refused == f"on m1: {TRACE}\n(1 more machine reports the same)\non m3: OSError: no file"
    assert found.told == ""


async def test_silent_and_slow_machines_are_told_and_refuse_nothing() -> None:
    slow, ended = Outcome(outcome=Outcome.SLOW), Outcome(outcome=Outcome.ENDED)
    found = await checked([agent(JOINED), agent(slow), agent(ended)], silent=1)
    assert found.refused == ""
    assert found.told == (
        "not tried on away0, which did not answer; m1: it had not called join after 30 s; "
        "m2: it ended with exit code 0 before it called join"
    )


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ConfigError("script job.py is not in the code 000000000000"), True),
        (AgentError("the fork server died"), False),
    ],
)
async def test_what_is_no_trial_refuses_only_what_is_wrong_with_the_version(error: Exception, refused: bool) -> None:
    """Only an error in the version itself refuses the version."""
    found = await checked([agent(error), agent(JOINED)])
    assert bool(found.refused) is refused
    assert str(error) in (found.refused or found.told)


async def test_a_machine_that_cannot_take_the_code_is_told_and_the_others_are_tried(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/job.py").write_text("print(1)\n")
    full = agent(JOINED, has_code=pb.HasCodeReply(), put_code=AgentError("m0 cannot keep the code: No space left"))
    with folder_snapshot(tmp_path / "code") as taken:
        store = VersionStore(str(tmp_path / "versions"))
        await store.put("gpt", CodeVersion(code=taken.digest, script="job.py"), taken)
        spec = JobSpec(name="gpt", script="job.py", code=taken.digest, machines=2)
        async with reached([full, agent(FAILED)]) as (pool, machines):
            given = CheckVersion(job=PlacedJob(spec=spec, machines=machines), patience_s=0.3)
            found = await perform(given, agents=pool, versions=store)
            alone = CheckVersion(job=PlacedJob(spec=spec, machines=machines[:1]), patience_s=0.3)
            nowhere = await perform(alone, agents=pool, versions=store)
    assert found.refused == f"on m1: {TRACE}"
    assert "m0 cannot store the code" in found.told
    assert "m0 cannot store the code" in nowhere.refused


async def test_code_that_goes_again_and_is_in_no_store_is_refused() -> None:
    found = await checked([agent(CodeMissing("m0 does not have the code"))])
    assert "m0: this worker has no store of versions" in found.refused


async def test_code_that_is_in_no_store_is_refused(tmp_path: Path) -> None:
    store = VersionStore(str(tmp_path / "versions"))
    found = await checked([agent(JOINED, has_code=pb.HasCodeReply())], store=store)
    assert "000000000000 is not in the store of versions" in found.refused


async def test_what_no_machine_could_try_is_refused() -> None:
    """For example, no fork server starts with the version's variables. Then its ranks could not start either."""
    unfit = AgentError("the fork server did not start: ValueError: Invalid format")
    found = await checked([agent(unfit), agent(unfit)], silent=1)
    assert found.refused.startswith("it could not be tried on any machine\nm0: ") and "Invalid format" in found.refused


def test_where_nobody_answers_nothing_is_refused() -> None:
    found = judged({}, ["m0", "m1"], {}, 30.0)
    assert found == VersionChecked(told="not tried on m0, m1, which did not answer")


async def test_real_agents_try_real_code(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    store, pool = VersionStore(str(tmp_path / "versions")), AgentClients()
    async with running_agent(tmp_path / "agent") as running:

        async def told(script: str) -> VersionChecked:
            (tmp_path / "code/job.py").write_text(script)
            with await asyncio.to_thread(folder_snapshot, tmp_path / "code") as taken:
                await store.put("gpt", CodeVersion(code=taken.digest, script="job.py"), taken)
                spec = JobSpec(name="gpt", script="job.py", code=taken.digest, cwd=str(tmp_path), policy=policy(60.0))
            given = CheckVersion(job=PlacedJob(spec=spec, machines=[Machine(name="m1", address=running.address)]))
            environment = ActivityEnvironment()
            environment.info = replace(
                environment.info, activity_id=taken.digest
            )  # each version is tried by a new activity
            return await perform(given, environment, agents=pool, versions=store)

        assert await told("import everstep\neverstep.join()\nraise SystemExit('went on')\n") == VersionChecked()
        broken = await told("import nothing_there\n")
        assert "ModuleNotFoundError: No module named 'nothing_there'" in broken.refused
        assert broken.refused.startswith("on m1: ")
    await pool.close()
