"""A version of a job's code is made: a snapshot of its files, in the store of versions."""

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
"""A snapshot that is not made within this time is given up."""


class VersionMade(Model):
    """A version is in the store."""

    runs: CodeVersion
    """Without the packages, which are in the store alone."""
    changed: str = ""
    """What changed against the version that runs, for people."""


class MakeVersion(Activity[VersionMade]):
    """Make the version that a request asks for, and put it into the store of versions.

    The same request makes the same version, as long as its folder is the same.
    """

    name = "Make version"

    job: str
    redact: list[str]
    """Names of variables whose values are not shown, as patterns."""
    running: CodeVersion
    request: UpdateRequest
    number: int
    """Of the version, for people."""
    needed: list[str] = Field(default_factory=list)
    """Ids of the versions that the job knows: they stay in the store. Empty: nothing is removed from it."""

    def line(self) -> str:
        what = self.request.code or self.request.git or "as it is, with other arguments or variables"
        return f"v{self.number} of {what}"

    def bounds(self) -> Bounds:
        return twice(LIMIT)

    async def perform(self, tools: Tools, say: Say) -> VersionMade:
        from activities.versions.make import changed, folder_of, next_version
        from activities.versions.progress import telling

        job, store = self.job, tools.versions
        try:
            running = self.running if store is None else await store.full(job, self.running)
            say("taking a snapshot of the code")
            if self.request.made is not None:
                made = self.request.made if store is None else await store.full(job, self.request.made)
            else:
                async with telling(say) as progress:
                    made = await next_version(job, running, self.request, store, progress)
            say("comparing it with the version that runs")
            text = await changed(running, made, store, self.redact)
            if store is not None and self.needed:
                await store.prune(job, {*self.needed, running.id, made.id})
        except NoSuchFolder as error:
            raise ApplicationError(
                f"there is no folder {folder_of(running, self.request)} on {socket.gethostname()}, where a worker "
                "looks for it. Give a folder that all workers see, or run 'everstep update' where the folder and "
                f"the store of versions are: it takes the snapshot there ({environment.VERSIONS} names the store)",
                type=NoSuchFolder.__name__,
                non_retryable=True,
            ) from error
        except (ConfigError, VersionStoreError) as error:
            away = isinstance(error, VersionStoreError)
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=not away) from error
        return VersionMade(runs=made.model_copy(update={"packages": {}}), changed=text)
