"""Check version: run a new version on machines up to its call of ``join``, before the job uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
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
"""The agent's answer may take this much longer than the trial itself, e.g. for a new fork server; seconds."""
SHIP_LIMIT = timedelta(minutes=10)
"""The transfer of a snapshot to the machines is given up after this time."""
OTHERS_NAMED = 3
"""The largest number of other machines whose results are quoted."""
LINE_CHARACTERS = 200
"""The largest number of characters that are quoted from one result."""


class VersionChecked(Model):
    """The result of a trial of a version."""

    refused: str = ""
    """Why the version cannot run: the first traceback, and how many machines report the same; empty: it can run."""
    told: str = ""
    """Problems for which the version is not refused, e.g. silent or slow machines; empty: there are none."""


class CheckVersion(Activity[VersionChecked]):
    """Bring a version to machines, and try it on all of them at once up to its call of ``join``."""

    name = "Check version"

    job: PlacedJob
    """The job, with the version to try."""
    patience_s: float = 60.0
    """Silent agents are asked again for this long, seconds."""

    @property
    def timeout_s(self) -> float:
        """The longest time that the script may take to reach its call of ``join``, seconds."""
        return self.job.spec.policy.update.check_s

    def line(self) -> str:
        return f"v{self.job.spec.version} on {len(self.job.machines)} machines, up to its call of join"

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
            """Return the result of the trial on a machine, or the reason why the version was not tried there."""
            try:
                await shipment.supply(client)
            except AgentUnreachable:
                raise
            except AgentError as error:  # e.g. a full disk: other machines may still give a result
                return f"{machine.name} cannot store the code: {error}"
            request = try_request(self.job.spec, position[machine.name], self.timeout_s)
            asked = partial(client.try_code, request, timeout_s=self.timeout_s + TRY_MORE_S)
            try:
                return await shipment.supplied(client, asked)
            except AgentUnreachable:
                raise
            except ConfigError as error:  # e.g. a folder does not exist
                return pb.TryCodeReply(outcome=pb.TryCodeReply.FAILED, text=str(error))
            except AgentError as error:  # e.g. no fork server: the error is not about the code
                return pb.TryCodeReply(outcome=pb.TryCodeReply.UNSPECIFIED, text=str(error))

        done, silent = await on_all(agents, self.job.machines, attempt, say=say, patience_s=self.patience_s)
        tried = {name: reply for name, reply in done.items() if not isinstance(reply, str)}
        untried = {name: reply for name, reply in done.items() if isinstance(reply, str)}
        return judged(tried, silent, untried, self.timeout_s)


def try_request(spec: JobSpec, machine: int, timeout_s: float) -> pb.TryCodeRequest:
    """Return a request for a trial of a machine's first rank; ``machine`` is the machine's index."""
    from activities.agents.convert import program_of, rank_launches, shared_environment
    from agent.v1 import agent_pb2 as pb

    first = rank_launches(spec, machine if machine < spec.machines else 0)[0]
    return pb.TryCodeRequest(
        request_id=request_id(),
        job=spec.name,
        program=program_of(spec, shared_environment(spec, "", 0, 1) | dict(first.env)),
        timeout_s=timeout_s,
    )


def judged(
    tried: dict[str, pb.TryCodeReply], silent: Collection[str], untried: dict[str, str], timeout_s: float
) -> VersionChecked:
    """Return the result of all trials. The version is refused if it fails on one machine. It is also refused if no
    machine that answers can try it, e.g. because no fork server starts. All other problems are only reported.

    Args:
        tried: Machine → its answer.
        silent: Machines that did not answer.
        untried: Machine → why the version was not tried there.
        timeout_s: The time limit of each trial, seconds.
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
            refused += f"\n({same} more {'machines report' if same > 1 else 'machine reports'} the same)"
        for name, line in list(others.items())[:OTHERS_NAMED]:
            refused += f"\non {name}: {line[:LINE_CHARACTERS]}"
    slow = [name for name, reply in tried.items() if reply.outcome == Outcome.SLOW]
    ended = [name for name, reply in tried.items() if reply.outcome == Outcome.ENDED]
    partly = {reply.text for reply in tried.values() if reply.outcome == Outcome.JOINED and reply.text}
    unsure = [
        f"{name}: {last_line(reply.text)}" for name, reply in tried.items() if reply.outcome == Outcome.UNSPECIFIED
    ]
    if not failed and (unsure or untried) and len(unsure) == len(tried):
        refused = "\n".join(["it could not be tried on any machine", *[*untried.values(), *unsure][:OTHERS_NAMED]])
    texts = [
        f"not tried on {listed(silent)}, which did not answer" if silent else "",
        f"{listed(slow)}: it had not called join after {timeout_s:g} s" if slow else "",
        f"{listed(ended)}: it ended with exit code 0 before it called join" if ended else "",
        *sorted(partly),
        listed([*untried.values(), *unsure], OTHERS_NAMED, separator="; "),
    ]
    return VersionChecked(refused=refused, told="; ".join(filter(None, texts)))


def last_line(text: str) -> str:
    """Return the line of a trial's output that describes the error. A line in parentheses after it, which says how the
    process ended, is skipped."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[-1].startswith("(") and lines[-1].endswith(")"):
        return lines[-2]
    return lines[-1] if lines else ""
