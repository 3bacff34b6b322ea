"""Stored histories replay on today's workflows, so running incidents survive a deployment. See ``histories.py``."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.worker import Replayer

from activities.payloads import DATA_CONVERTER
from everstep.model.stage import Stage
from tests.workflows.histories import load, stored
from workflows.registry import WORKFLOWS, sandbox

ROOT = Path(__file__).resolve().parent.parent.parent
HISTORIES = stored()
MOST = 15
"""The largest number of histories. Each history shows something that no other history shows."""
ENDS = {Stage.OPEN, Stage.ACCEPTED, Stage.NOT_CONFIRMED, Stage.ABANDONED, Stage.CLOSED}
"""Stages in which an incident does nothing that a history could show."""


def test_the_histories_have_each_workflow_and_each_stage() -> None:
    begun = [load(path).events[0].workflow_execution_started_event_attributes for path in HISTORIES]
    shown = {
        json.loads(event.upsert_workflow_search_attributes_event_attributes.search_attributes.indexed_fields[key].data)
        for path in HISTORIES
        if path.stem.startswith("incident")
        for event in load(path).events
        for key in event.upsert_workflow_search_attributes_event_attributes.search_attributes.indexed_fields
        if key == "Stage"
    }

    workflows = {workflow._Definition.must_from_class(one).name for one in WORKFLOWS}
    assert {one.workflow_type.name for one in begun} == workflows
    assert any(one.continued_execution_run_id for one in begun), "one of the histories continued as new"
    assert shown >= set(Stage) - ENDS
    assert len(HISTORIES) <= MOST


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_stored_history_replays(path: Path) -> None:
    replayer = Replayer(workflows=WORKFLOWS, data_converter=DATA_CONVERTER, workflow_runner=sandbox())

    await replayer.replay_workflow(load(path))


@workflow.defn(name="Incident", sandboxed=False)
class OtherIncident:
    """An incident with other commands, which a replay must notice."""

    @workflow.run
    async def run(self, input: object) -> None:
        await workflow.sleep(1)


async def test_a_changed_workflow_does_not_replay() -> None:
    replayer = Replayer(workflows=[OtherIncident], data_converter=DATA_CONVERTER)
    path = next(path for path in HISTORIES if path.name.startswith("incident"))

    with pytest.raises(workflow.NondeterminismError):
        await replayer.replay_workflow(load(path))


# Each patch names the release with which it came, and is removed two releases later.


def releases() -> list[str]:
    """Return all releases, the newest first, including the version that is being developed."""
    found = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    made = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return found if made in found else [made, *found]


def outdated(source: str, known: list[str]) -> list[str]:
    """Return the patches that name no release, or a release that is older than the one before the newest."""
    ids = re.findall(r"\.patched\(\s*(?:f?[\"'](.*?)[\"'])?", source)
    return [id for id in ids if (id.partition(" ")[0] not in known[:2])]


def test_no_patch_is_older_than_the_release_before_the_newest() -> None:
    known = releases()
    for path in (ROOT / "workflows").rglob("*.py"):
        assert outdated(path.read_text(), known) == [], path


def test_a_patch_without_a_release_or_of_an_old_release_is_found() -> None:
    known = ["0.3.0", "0.2.0", "0.1.0"]
    for good in ('workflow.patched("0.3.0 the job is told")', 'workflow.patched(\n    "0.2.0 the job is told"\n)'):
        assert outdated(good, known) == []
    for bad in ('workflow.patched("0.1.0 x")', 'workflow.patched("the job is told")', "workflow.patched(PATCH)"):
        assert len(outdated(bad, known)) == 1
