"""Make version: store a snapshot of a job's code."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import Field
from temporalio.exceptions import ApplicationError

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from everstep.errors import ConfigError, NoSuchFolder, VersionStoreError
from everstep.model.message import Model
from everstep.model.version import CodeVersion, UpdateRequest
from everstep.rank import environment

if TYPE_CHECKING:
    from activities.tools import Tools

LIMIT = timedelta(minutes=10)
"""The time limit for making a snapshot."""


class VersionMade(Model):
    """The result: the version that was made and put into the store."""

    runs: CodeVersion
    """The version, without its packages, which only the store has."""
    changed: str = ""
    """The changes from the running version, as text."""


class MakeVersion(Activity[VersionMade]):
    """Make the requested version, and put it into the store of versions.

    A repeated request makes the same version, as long as its folder does not change.
    """

    name = "Make version"

    job: str
    redact: list[str]
    """Patterns of the names of variables whose values are not shown."""
    running: CodeVersion
    request: UpdateRequest
    number: int
    """The number of the version, for the timeline."""
    needed: list[str] = Field(default_factory=list)
    """The ids of the versions that the job knows, which stay in the store. Empty: no version is removed."""

    def line(self) -> str:
        source = self.request.code or self.request.git or "the running code, with other arguments or variables"
        return f"v{self.number} of {source}"

    def bounds(self) -> Bounds:
        return twice(LIMIT)

    async def perform(self, tools: Tools, say: Say) -> VersionMade:
        from activities.versions.make import changed, folder_of, next_version
        from activities.versions.progress import showing_progress

        job, store = self.job, tools.versions
        try:
            running = self.running if store is None else await store.full(job, self.running)
            say("making a snapshot of the code")
            if self.request.made is not None:
                made = self.request.made if store is None else await store.full(job, self.request.made)
            else:
                async with showing_progress(say) as progress:
                    made = await next_version(job, running, self.request, store, progress)
            say("comparing it with the running version")
            text = await changed(running, made, store, self.redact)
            if store is not None and self.needed:
                await store.prune(job, {*self.needed, running.id, made.id})
        except NoSuchFolder as error:
            raise ApplicationError(
                f"there is no folder {folder_of(running, self.request)} on {socket.gethostname()}, a worker's host. "
                "Give a folder that all workers can read, or run 'everstep update' where both this folder and the "
                f"store of versions ({environment.VERSIONS}) can be reached: the command then makes the snapshot there",
                type=NoSuchFolder.__name__,
                non_retryable=True,
            ) from error
        except (ConfigError, VersionStoreError) as error:
            away = isinstance(error, VersionStoreError)
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=not away) from error
        return VersionMade(runs=made.model_copy(update={"packages": {}}), changed=text)
