"""The activity that makes a version."""

from __future__ import annotations

import socket

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import messages
from activities.heartbeat import heartbeating
from activities.messages import MakeVersionInput, VersionMade
from activities.versions.make import changed, folder_of, next_version
from activities.versions.progress import telling
from activities.versions.store import VersionStore
from everstep.errors import ConfigError, NoSuchFolder, VersionStoreError
from everstep.rank import environment


class MakeActivities:
    """What workflows have made of other code.

    Args:
        store: Of versions; None: there is none, and jobs run in place.
    """

    def __init__(self, store: VersionStore | None) -> None:
        self._store = store

    @activity.defn(name=messages.MAKE_VERSION)
    async def make(self, given: MakeVersionInput) -> VersionMade:
        """Make a version and put it into the store; the same request makes the same one, as long as its folder is."""
        job, store = given.spec.name, self._store
        async with heartbeating() as say:
            try:
                running = given.running if store is None else await store.full(job, given.running)
                say("taking a snapshot of the code")
                if given.request.made is not None:
                    made = given.request.made if store is None else await store.full(job, given.request.made)
                else:
                    async with telling(say) as progress:
                        made = await next_version(job, running, given.request, store, progress)
                say("comparing it with the version that runs")
                text = await changed(running, made, store, given.spec.redact)
                if store is not None and given.needed:
                    await store.prune(job, {*given.needed, running.id, made.id})
            except NoSuchFolder as error:
                raise ApplicationError(
                    f"there is no folder {folder_of(running, given.request)} on {socket.gethostname()}, where a worker "
                    "looks for it. Give a folder that all workers see, or run 'everstep update' where the folder and "
                    f"the store of versions are: it takes the snapshot there ({environment.VERSIONS} names the store)",
                    type=NoSuchFolder.__name__,
                    non_retryable=True,
                ) from error
            except (ConfigError, VersionStoreError) as error:
                away = isinstance(error, VersionStoreError)
                raise ApplicationError(str(error), type=type(error).__name__, non_retryable=not away) from error
        return VersionMade(runs=made.model_copy(update={"packages": {}}), changed=text)
