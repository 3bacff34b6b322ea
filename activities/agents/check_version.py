"""A version is tried before it runs: brought to machines, and run there up to where it joins the job."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from temporalio.exceptions import ApplicationError

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, request_id
from everstep.base.text import listed
from everstep.errors import AgentError, AgentUnreachable, ConfigError, VersionStoreError
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.message import Model

if TYPE_CHECKING:
    from activities.agents.ship import Shipment
    from activities.tools import Tools
    from agent.client import AgentClient, AgentClients
    from agent.v1 import agent_pb2 as pb

TRY_MORE_S = 60.0
"""An agent has this much longer than the trial itself to answer, e.g. for a fork server of its own, seconds."""
SHIP_LIMIT = timedelta(minutes=10)
"""A snapshot that is not brought to the machines within this time is given up."""
OTHERS_NAMED = 3
"""Machines that say something else than the first one that are quoted."""
LINE_CHARACTERS = 200
"""Of what each of them says."""


class VersionChecked(Model):
    """What came of trying a version."""

    refused: str = ""
    """Why it cannot run: the first traceback, on which machine, and how many others say the same; empty: it can."""
    told: str = ""
    """What is no reason to refuse it: machines that were silent, or slow; empty: nothing."""


class CheckVersion(Activity[VersionChecked]):
    """Bring a version to machines, and try it on all of them at once up to where it joins the job."""

    name = "Check version"

    job: PlacedJob
    """The job as the version is to run it."""
    patience_s: float = 60.0
    """How long a silent agent is asked again, seconds."""

    @property
    def timeout_s(self) -> float:
        """How long the script may take to come to where it joins, seconds."""
        return self.job.spec.policy.update.check_s

    def line(self) -> str:
        return f"v{self.job.spec.version} on {len(self.job.machines)} machines, up to where it joins the job"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self.timeout_s) + SHIP_LIMIT)

    async def perform(self, tools: Tools, say: Say) -> VersionChecked:
        from activities.agents.ship import Shipment

        async with Shipment(tools.versions, self.job.spec.code, say) as shipment:
            try:
                return await self._checked(tools.agents, shipment, say)
            except ApplicationError as error:
                if error.type == VersionStoreError.__name__:
                    return VersionChecked(refused=error.message)
                raise

    async def _checked(self, agents: AgentClients, shipment: Shipment, say: Say) -> VersionChecked:
        from activities.agents.call_all import on_all
        from agent.v1 import agent_pb2 as pb

        position = {machine.name: index for index, machine in enumerate(self.job.machines)}

        async def attempt(machine: Machine, client: AgentClient) -> pb.TryCodeReply | str:
            """What came of it there; a text: why it was not tried."""
            try:
                await shipment.supply(client)
            except AgentUnreachable:
                raise
            except AgentError as error:  # e.g. a full disk: other machines can tell more
                return f"{machine.name} cannot take the code: {error}"
            request = try_request(self.job.spec, position[machine.name], self.timeout_s)
            asked = partial(client.try_code, request, timeout_s=self.timeout_s + TRY_MORE_S)
            try:
                return await shipment.supplied(client, asked)
            except AgentUnreachable:
                raise
            except ConfigError as error:  # e.g. a folder that is not there
                return pb.TryCodeReply(outcome=pb.TryCodeReply.FAILED, text=str(error))
            except AgentError as error:  # e.g. no fork server: that proves nothing of the code
                return pb.TryCodeReply(outcome=pb.TryCodeReply.UNSPECIFIED, text=str(error))

        done, silent = await on_all(agents, self.job.machines, attempt, say=say, patience_s=self.patience_s)
        tried = {name: reply for name, reply in done.items() if not isinstance(reply, str)}
        untried = {name: reply for name, reply in done.items() if isinstance(reply, str)}
        return judged(tried, silent, untried, self.timeout_s)


def try_request(spec: JobSpec, machine: int, timeout_s: float) -> pb.TryCodeRequest:
    """The first rank of a machine, by its index, as it would be launched."""
    from activities.agents.convert import import_environment, rank_launches, shared_environment
    from agent.v1 import agent_pb2 as pb

    first = rank_launches(spec, machine if machine < spec.machines else 0)[0]
    return pb.TryCodeRequest(
        request_id=request_id(),
        job=spec.name,
        code=spec.code,
        script=spec.script,
        args=spec.args,
        cwd=spec.cwd,
        cwd_by_default=spec.cwd_by_default,
        python=spec.python,
        env=shared_environment(spec, "", 0, 1) | dict(first.env),
        env_from=spec.env_from,
        env_file=spec.env_file,
        timeout_s=timeout_s,
        import_env=import_environment(spec),
    )


def judged(
    tried: dict[str, pb.TryCodeReply], silent: list[str], untried: dict[str, str], timeout_s: float
) -> VersionChecked:
    """What came of it: one machine where it fails refuses the version, and so does that none of those that answer could
    try it, e.g. as no fork server starts with its variables; what else proves nothing is told.

    Args:
        tried: Machine → what it said.
        silent: Machines that did not answer.
        untried: Machine → why it was not tried there.
        timeout_s: How long each had.
    """
    from agent.v1.agent_pb2 import TryCodeReply as Outcome

    failed = {name: reply.text for name, reply in tried.items() if reply.outcome == Outcome.FAILED}
    refused = ""
    if failed:
        first, text = next(iter(failed.items()))
        same = Counter(last_line(other) for other in failed.values())[last_line(text)] - 1
        others = {name: last_line(other) for name, other in failed.items() if last_line(other) != last_line(text)}
        refused = f"on {first}: {text.strip()}"
        if same:
            refused += f"\n({same} more {'machines say' if same > 1 else 'machine says'} the same)"
        for name, line in list(others.items())[:OTHERS_NAMED]:
            refused += f"\non {name}: {line[:LINE_CHARACTERS]}"
    slow = [name for name, reply in tried.items() if reply.outcome == Outcome.SLOW]
    ended = [name for name, reply in tried.items() if reply.outcome == Outcome.ENDED]
    partly = {reply.text for reply in tried.values() if reply.outcome == Outcome.JOINED and reply.text}
    unsure = [
        f"{name}: {last_line(reply.text)}" for name, reply in tried.items() if reply.outcome == Outcome.UNSPECIFIED
    ]
    if not failed and (unsure or untried) and len(unsure) == len(tried):
        refused = "\n".join(["it could be tried on no machine", *[*untried.values(), *unsure][:OTHERS_NAMED]])
    texts = [
        f"not tried on {listed(silent)}, which did not answer" if silent else "",
        f"{listed(slow)}: it had not come to where it joins the job after {timeout_s:g} s" if slow else "",
        f"{listed(ended)}: it ended with exit code 0 before it joined the job" if ended else "",
        *sorted(partly),
        listed([*untried.values(), *unsure], OTHERS_NAMED, separator="; "),
    ]
    return VersionChecked(refused=refused, told="; ".join(filter(None, texts)))


def last_line(text: str) -> str:
    """Of what a trial says: the line that says what went wrong; the one after it says how the process ended."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[-1].startswith("(") and lines[-1].endswith(")"):
        return lines[-2]
    return lines[-1] if lines else ""
