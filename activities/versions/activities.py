"""Making a version of a job's code, and trying it on the machines before it is applied."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import messages
from activities.agents.call_all import on_all
from activities.agents.convert import import_environment, rank_launches, shared_environment
from activities.heartbeat import heartbeating, request_id
from activities.messages import CheckVersionInput, MakeVersionInput, VersionChecked, VersionMade
from activities.versions.changes import changes
from activities.versions.packages import packages_of
from activities.versions.ship import Shipment
from activities.versions.snapshot import CodeSnapshot, folder_snapshot, revision_snapshot
from activities.versions.store import VersionStore
from agent.client import AgentClient, AgentPool
from agent.v1 import agent_pb2 as pb
from everstep.errors import ConfigError, VersionStoreError
from everstep.model.machine import Machine
from everstep.model.version import CodeVersion, UpdateRequest
from everstep.text import listed

NAMED = 4
"""Machines that an answer names (ours)."""
TRY_EXTRA_S = 60.0
"""Beyond the script's own time: until a fork server is there (ours)."""
NOWHERE = "127.0.0.1"
"""Rendezvous address of a script that is tried: it ends before it meets anybody."""


class VersionActivities:
    """The activities on versions of code.

    Args:
        agents: Clients by address.
        store: Of versions; None: there is none, and only what runs in place can be run otherwise.
    """

    def __init__(self, agents: AgentPool, store: VersionStore | None) -> None:
        self._agents = agents
        self._store = store

    @activity.defn(name=messages.MAKE_VERSION)
    async def make(self, given: MakeVersionInput) -> VersionMade:
        """Make what a request asks for and put it into the store; made twice it is the same."""
        try:
            async with heartbeating() as say:
                say("the files are read")
                return await self._make(given)
        except (ConfigError, VersionStoreError) as error:
            away = isinstance(error, VersionStoreError)
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=not away) from error

    async def _make(self, given: MakeVersionInput) -> VersionMade:
        request, running, job = given.request, given.running, given.spec.name
        made, told = request.made, ""
        if made is None:
            made = running.model_copy(update={"script": request.script or running.script})
            if request.code or request.git:
                made = await self._with_code(request, running, job)
            made = made.model_copy(
                update={
                    "args": running.args if request.args is None else request.args,
                    "env": running.env | (request.env or {}),
                    "packages": await asyncio.to_thread(packages_of, running.python),
                }
            )
        told = await changes(self._store, running, made, given.spec.redact)
        if self._store is not None:
            await self._store.put(job, made, None)
        return VersionMade(runs=made.model_copy(update={"packages": {}}), changed=told)

    async def _with_code(self, request: UpdateRequest, running: CodeVersion, job: str) -> CodeVersion:
        """The running version with the code that a request names.

        Raises:
            ConfigError: there is no such code, or it cannot be a version.
            VersionStoreError: the store does not take it.
        """
        folder = request.code or running.origin.folder
        if self._store is None:
            raise ConfigError(
                "there is no store of versions: start all workers with the same --versions URL (EVERSTEP_VERSIONS)"
            )
        if not folder:
            raise ConfigError("the version that runs came from no folder: give one, as code, beside the revision")
        taken = await asyncio.to_thread(_taken, Path(folder), request.git)
        with taken:
            made = version_of(taken, running, request.script)
            await self._store.put(job, made, taken)
        return made

    @activity.defn(name=messages.CHECK_VERSION)
    async def check(self, given: CheckVersionInput) -> VersionChecked:
        """Bring a version to machines, and try it there, on all of them at once."""
        spec = given.spec
        try:
            async with heartbeating() as say, Shipment(self._store, spec.code, say) as shipment:
                position = {machine.name: index for index, machine in enumerate(given.machines)}
                done: list[str] = []

                async def check_machine(machine: Machine, client: AgentClient) -> pb.TryCodeReply:
                    await shipment.supply(client)
                    request = _trial(given, position[machine.name])
                    reply = await client.try_code(request, timeout_s=given.timeout_s + TRY_EXTRA_S)
                    done.append(machine.name)
                    say(f"{len(done)} of {len(given.machines)} machines tried it")
                    return reply

                replies, silent = await on_all(
                    self._agents, given.machines, check_machine, say=say, patience_s=given.patience_s
                )
        except VersionStoreError as error:
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=True) from error
        return judged(replies, silent)


def judged(replies: dict[str, pb.TryCodeReply], silent: list[str]) -> VersionChecked:
    """What the trials of a version say: it is refused for what failed, and told what is not known."""
    failed = {name: reply.text for name, reply in replies.items() if reply.outcome == pb.TryCodeReply.FAILED}
    slow = sorted(name for name, reply in replies.items() if reply.outcome == pb.TryCodeReply.SLOW)
    ended = sorted(name for name, reply in replies.items() if reply.outcome == pb.TryCodeReply.ENDED)
    told = [
        f"{listed(names, NAMED)} {what}"
        for names, what in (
            (silent, "did not answer: it was not tried there"),
            (slow, "had not come to where it joins the job in time"),
            (ended, "ended before it joined the job, with exit code 0"),
        )
        if names
    ]
    if not failed:
        return VersionChecked(told="; ".join(told))
    first = min(failed)
    last_lines = Counter(text.strip().splitlines()[-1] if text.strip() else "" for text in failed.values())
    others = len(failed) - 1
    same = len(last_lines) == 1
    more = f" (and {others} others{', with the same' if same else ''})" if others else ""
    return VersionChecked(refused=f"{first}{more}: {failed[first]}", told="; ".join(told))


def _trial(given: CheckVersionInput, machine: int) -> pb.TryCodeRequest:
    """What a machine is asked: to be its first rank, up to where that joins the job."""
    spec = given.spec
    own = rank_launches(spec, machine)[0].env
    return pb.TryCodeRequest(
        request_id=f"{request_id()}/{machine}",
        job=spec.name,
        code=spec.code,
        script=spec.script,
        args=spec.args,
        cwd=spec.cwd,
        python=spec.python,
        env=shared_environment(spec, NOWHERE, 1, 1) | dict(own),
        env_from=spec.env_from,
        env_file=spec.env_file,
        timeout_s=given.timeout_s,
        import_env=import_environment(spec),
    )


def version_of(taken: CodeSnapshot, runs: CodeVersion, script: str = "") -> CodeVersion:
    """A version with the code of a snapshot, and all else as in another version.

    Args:
        taken: The snapshot.
        runs: The other version; its script may be an absolute path, where it runs in place.
        script: Another one, relative to the folder; empty: the same.

    Raises:
        ConfigError: the script is not among its files.
    """
    before = Path(runs.script)
    folder = Path(taken.origin.folder)
    if not script:
        script = str(before.relative_to(folder)) if before.is_relative_to(folder) else runs.script
        script = before.name if script.startswith("/") else script
    names = {file.path for file in taken.files}
    if os.path.normpath(script) not in names:
        near = sorted(name for name in names if name.endswith(".py"))
        raise ConfigError(
            f"{script} is not among the files of {folder}, or git ignores it: name the script, relative to the folder; "
            f"there are {listed(near[:200], NAMED)}"
        )
    return runs.model_copy(
        update={
            "code": taken.digest,
            "script": os.path.normpath(script),
            # Data and output stay where they were.
            "cwd": runs.cwd or ("" if runs.code else str(before.parent)),
            "origin": taken.origin,
            "files": len(taken.files),
            "bytes": taken.bytes,
        }
    )


def _taken(folder: Path, revision: str) -> CodeSnapshot:
    return revision_snapshot(folder, revision) if revision else folder_snapshot(folder)
