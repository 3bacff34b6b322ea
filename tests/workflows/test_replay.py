"""Histories of earlier releases replay on today's workflows: a running incident survives a deployment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from activities.payloads import DATA_CONVERTER
from workflows.registry import WORKFLOWS, sandbox

HISTORIES = sorted((Path(__file__).parent.parent / "histories").glob("*.json"))


def load(path: Path) -> WorkflowHistory:
    text = path.read_text()
    started = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(started["workflowId"], text)


def test_there_are_histories_of_all_workflows() -> None:
    kinds = {path.stem.split("-")[0] for path in HISTORIES}

    assert {"job", "incident", "notice", "pool", "replay"} <= kinds


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_stored_history_replays(path: Path) -> None:
    replayer = Replayer(workflows=WORKFLOWS, data_converter=DATA_CONVERTER, workflow_runner=sandbox())

    await replayer.replay_workflow(load(path))


@workflow.defn(name="Incident", sandboxed=False)
class OtherIncident:
    """An incident that does something else: what a replay must notice."""

    @workflow.run
    async def run(self, given: object) -> None:
        await workflow.sleep(1)


async def test_a_changed_workflow_does_not_replay() -> None:
    replayer = Replayer(workflows=[OtherIncident], data_converter=DATA_CONVERTER)
    path = next(path for path in HISTORIES if path.name.startswith("incident"))

    with pytest.raises(workflow.NondeterminismError):
        await replayer.replay_workflow(load(path))
