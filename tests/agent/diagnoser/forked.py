"""Runs diagnostic tests as agents do, in a process forked from a parent that has imported torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.diagnoser.process import DiagnosisProcess, DiagnosticRequest
from everstep.model.diagnosis import DiagnosticResult

Run = Callable[..., DiagnosticResult]


@contextmanager
def forked_tests(folder: Path) -> Iterator[Run]:
    """Yield a function that runs a test, given by name, with settings, on ``machine`` and with ``peer``."""
    process = DiagnosisProcess()

    def run(
        test: str, *, machine: str = "m0", peer: Any = None, within_s: float = 60.0, waits: Any = None, **settings: Any
    ) -> DiagnosticResult:
        bench = {"machine": machine, "host": "127.0.0.1", "folder": str(folder), "environment": {}, "peer": peer}
        return process.run(DiagnosticRequest(test, json.dumps(settings), bench, within_s), waits or (lambda port: None))

    try:
        yield run
    finally:
        process.close()
