"""Drills: run a job, inject a real fault, judge the recovery.

Used by ``everstep drill`` and ``everstep demo``, by the end-to-end tests and by the benchmarks::

    result = await run_drill(drill_request("kill-rank", ranks=[5]))

or, to use one cluster for several drills::

    async with DrillCluster() as cluster:
        results = [await Drill(cluster, request).run() for request in requests]

Importing this package costs nothing; its names are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drills.clusters.local import DrillCluster
    from drills.faults.all import FAULTS, drill_request
    from drills.judge.result import DrillResult
    from drills.runner import Drill, run_drill
    from drills.spec.request import DrillRequest

__all__ = ["FAULTS", "Drill", "DrillCluster", "DrillRequest", "DrillResult", "drill_request", "run_drill"]

_HOME = {
    "FAULTS": "faults.all",
    "Drill": "runner",
    "DrillCluster": "clusters.local",
    "DrillRequest": "spec.request",
    "DrillResult": "judge.result",
    "drill_request": "faults.all",
    "run_drill": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'drills' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"drills.{_HOME[name]}"), name)
