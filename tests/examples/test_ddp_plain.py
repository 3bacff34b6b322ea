"""A script without everstep's library continues from its own checkpoint."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest


@pytest.mark.timeout(300)
def test_it_goes_on_after_a_kill(make_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = make_job("ddp_plain.py", ["--out", str(out), "--steps", "40", "--every", "4", "--step-seconds", "0.05"], dp=2)
    codes: list[int] = []
    first = Thread(target=lambda: codes.extend(job.launch()))
    first.start()
    while not (out / "checkpoint.pt").exists():
        assert first.is_alive()
        time.sleep(0.01)
    os.kill(job.pids[1], signal.SIGKILL)
    first.join()
    assert codes[1] == -signal.SIGKILL
    before = [json.loads(line)["step"] for line in (out / "losses.jsonl").read_text().splitlines()]
    assert before[-1] < 39
    assert job.launch() == [0, 0]
    steps = [json.loads(line)["step"] for line in (out / "losses.jsonl").read_text().splitlines()]
    again = steps[len(before)]
    assert again > 0 and again % 4 == 0
    assert steps[len(before) :] == list(range(again, 40))
