"""``everstep run --detach`` waits a moment. So it does not report a job as running that is refused at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from console.commands import run
from everstep.errors import ClusterError
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState

STARTING = JobState(spec=JobSpec(name="gpt", script="/gpt.py"), machines=[])
REFUSED = STARTING.model_copy(update={"outcome": "was not started: no room"})
LAUNCHED = STARTING.model_copy(update={"lineage": [(1, -1)]})


def control(*answers: JobState | Exception) -> Any:
    left = list(answers)

    async def state(job: str) -> JobState:
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return SimpleNamespace(state=state)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((STARTING, REFUSED), "job gpt was not started: no room"),
        ((STARTING, LAUNCHED), ""),
        ((ClusterError("no worker"),), ""),
        ((STARTING,), ""),
    ],
)
async def test_the_command_waits_for_an_early_refusal(answers: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "REFUSAL_S", 0.3)
    assert await run.refused(control(*answers), "gpt") == said
