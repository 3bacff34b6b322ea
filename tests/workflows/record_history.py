"""Store the history of a workflow for the replay tests: ``python tests/workflows/record_history.py ID NAME``.

Uses Temporal's own settings (TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE). Host name
and folders of the machine are replaced, so that a stored history names nobody.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from controlplane.worker import connect

HERE = Path(__file__).resolve()
HISTORIES = HERE.parent.parent / "histories"
REPLACED = {
    str(HERE.parent.parent.parent): "/srv/everstep",
    tempfile.gettempdir(): "/var/tmp",
    os.uname().nodename: "host",
}


async def record(workflow_id: str, name: str) -> None:
    """Fetch a history and write it to ``tests/histories/<name>.json``."""
    client = await connect()
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    scrubbed = scrub(json.loads(history.to_json()))
    (HISTORIES / f"{name}.json").write_text(json.dumps(scrubbed, indent=1))


def scrub(value: Any) -> Any:
    """Replace what belongs to this machine, inside the payloads too."""
    if isinstance(value, dict):
        if "data" in value and "metadata" in value:
            plain = base64.b64decode(value["data"]).decode()
            return {**value, "data": base64.b64encode(scrub(plain).encode()).decode()}
        return {key: scrub(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [scrub(inner) for inner in value]
    if isinstance(value, str):
        for found, shown in REPLACED.items():
            value = value.replace(found, shown)
    return value


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1], sys.argv[2]))
    os._exit(0)  # a Temporal client may crash the interpreter at its normal end
