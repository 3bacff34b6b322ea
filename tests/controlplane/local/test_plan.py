"""The state that the supervisor keeps on disk."""

from __future__ import annotations

import json
from pathlib import Path

from controlplane.local.plan import Running, State


def test_processes_from_before_a_reboot_are_forgotten(tmp_path: Path) -> None:
    state = State(supervisor_pid=4711, supervisor_start=99, processes={"agent m1": Running(4712, 100, "agent")})
    state.save(tmp_path)
    assert State.load(tmp_path) == state

    path = tmp_path / "state.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"boot": "another"}))
    assert State.load(tmp_path) == State()
