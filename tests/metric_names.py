"""The metrics that agents, workers and Temporal's SDK serve: each name with its labels."""

from __future__ import annotations

from agent.exposition import COMMON, RENAMED, Described
from agent.monitor.all import INSPECTIONS
from agent.server.metrics import METRICS as OF_AGENT
from controlplane.worker_metrics import METRICS as OF_WORKER
from controlplane.worker_metrics import OF_TEMPORAL

Labels = dict[str, set[str]]


def _labels(*metrics: Described) -> Labels:
    return {one.full_name: {RENAMED.get(label, label) for label in one.labels} for one in metrics}


AGENT: Labels = _labels(*OF_AGENT.values(), *COMMON.values())
INSPECTED: Labels = _labels(*(metric for kind in INSPECTIONS for metric in kind.metrics.values()))
WORKER: Labels = _labels(*OF_WORKER.values(), *COMMON.values())
TEMPORAL: Labels = {name: set() for name in OF_TEMPORAL}
