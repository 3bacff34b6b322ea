"""The activity that makes a version."""

from __future__ import annotations

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import messages
from activities.heartbeat import heartbeating
from activities.messages import MakeVersionInput, VersionMade
from activities.versions.make import changed, next_version
from activities.versions.store import VersionStore
from everstep.errors import ConfigError, VersionStoreError


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
                    made = await next_version(job, running, given.request, store)
                say("comparing it with the version that runs")
                text = await changed(running, made, store, given.spec.redact)
                if store is not None and given.needed:
                    await store.prune(job, {*given.needed, running.id, made.id})
            except (ConfigError, VersionStoreError) as error:
                away = isinstance(error, VersionStoreError)
                raise ApplicationError(str(error), type=type(error).__name__, non_retryable=not away) from error
        return VersionMade(runs=made.model_copy(update={"packages": {}}), changed=text)
