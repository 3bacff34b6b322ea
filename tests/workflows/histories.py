"""Records histories of workflows in tests, and stores and loads them.

``make histories`` runs the tests that are marked ``@pytest.mark.history("NAME", …)``. For each name, it stores the
history of a workflow that the test ran. NAME begins with the type of the workflow, e.g. ``incident-evicted``. If there
are several workflows of that type, the newest is stored. If a workflow continued as new, its last run is stored.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHistory

HERE = Path(__file__).resolve()
FOLDER = HERE.parent.parent / "histories"
REPLACED = {
    str(HERE.parent.parent.parent): "/srv/everstep",
    tempfile.gettempdir(): "/var/tmp",
    os.uname().nodename: "host",
}
"""Text that belongs to the recording machine → the text that is stored instead."""


def stored() -> list[Path]:
    """Return the files of all histories."""
    return sorted(FOLDER.glob("*.json"))


def load(path: Path) -> WorkflowHistory:
    """Return the history of one file."""
    text = path.read_text()
    started = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(started["workflowId"], text)


async def record(client: Client, names: Sequence[str], since: datetime) -> None:
    """Store the histories of workflows that were started since a time.

    Raises:
        LookupError: no workflow of the type that a name begins with was started.
    """
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        kind = name.partition("-")[0]
        started = [
            execution
            async for execution in client.list_workflows(f"StartTime >= '{since.isoformat()}'")
            if execution.workflow_type.lower().endswith(kind)
        ]
        if not started:
            raise LookupError(f"no workflow of type {kind} was started for {name}")
        newest = max(started, key=lambda execution: execution.start_time)
        history = await client.get_workflow_handle(newest.id, run_id=newest.run_id).fetch_history()
        (FOLDER / f"{name}.json").write_text(json.dumps(_scrubbed(json.loads(history.to_json())), indent=1))


def _scrubbed(value: Any) -> Any:
    """Replace text that belongs to this machine, also within payloads."""
    if isinstance(value, dict):
        if "data" in value and "metadata" in value:
            plain = base64.b64decode(value["data"]).decode()
            return {**value, "data": base64.b64encode(_scrubbed(plain).encode()).decode()}
        return {key: _scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_scrubbed(inner) for inner in value]
    if isinstance(value, str):
        for found, shown in REPLACED.items():
            value = value.replace(found, shown)
    return value
