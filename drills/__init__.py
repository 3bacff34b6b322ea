"""Drills: a drill runs a job on a local cluster, injects a real fault, and judges the recovery.

The commands ``everstep drill`` and ``everstep demo``, the end-to-end tests and the benchmarks use this package::

    result = await run_drill(drill_request("kill-rank", ranks=[5]))

Several drills can share one cluster::

    async with DrillCluster() as cluster:
        results = [await Drill(cluster, request).run() for request in requests]

Importing this package is cheap: its names are imported when they are first used.
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

_MODULES = {
    "FAULTS": "faults.all",
    "Drill": "runner",
    "DrillCluster": "clusters.local",
    "DrillRequest": "spec.request",
    "DrillResult": "judge.result",
    "drill_request": "faults.all",
    "run_drill": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'drills' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"drills.{_MODULES[name]}"), name)
