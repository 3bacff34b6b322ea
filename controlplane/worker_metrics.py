"""What a worker tells Prometheus: its own metrics here, those of Temporal's SDK on a port of the SDK's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

import everstep
from activities.heartbeat import steady_ns
from activities.ledger.machine_events import EventWriter
from activities.watching.watcher import Watcher
from agent.exposition import MetricsServer, Samples, parsed_address
from everstep.errors import ConfigError

KINDS = {"report": "anomaly", "finished": "finished"}
"""Update of a job's workflow → what was reported by it."""


def samples_of(watcher: Watcher, events: EventWriter, task_queue: str) -> Samples:
    """All that a worker knows now. Called in its event loop."""
    samples = Samples()
    samples.add("worker_info", 1, "The worker.", version=everstep.__version__, task_queue=task_queue)
    samples.add("jobs_watched", len(watcher.watched), "Jobs that the worker watches.")
    now_ns = steady_ns()
    for job in watcher.watched.values():
        name = {"job": job.spec.name}
        samples.add("machines_watched", len(job.machines), "Machines of a job that is watched.", **name)
        meaning = "Machines of a job whose agents say nothing."
        samples.add("agents_silent", len(job.silent(now_ns)), meaning, **name)
    for update, kind in KINDS.items():
        meaning = "Reports that jobs' workflows took from this worker; each worker reports every one."
        samples.add("reports_total", watcher.reported[update], meaning, kind=kind)
    samples.add("ledger_events_waiting", events.waiting, "What happened to machines and is not in the ledger yet.")
    return samples


def metrics_server(address: str, watcher: Watcher, events: EventWriter, task_queue: str) -> MetricsServer:
    """What serves them.

    Raises:
        ConfigError: the address is none.
    """
    of_process = ProcessCollector(registry=CollectorRegistry())
    return MetricsServer(address, lambda: samples_of(watcher, events, task_queue), [of_process])


def temporal_runtime(address: str) -> Runtime:
    """Temporal's SDK with metrics on a port of its own.

    Names and units are Prometheus': counters with ``_total``, durations in seconds.

    Args:
        address: ``host:port``, the host an IP address.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    parsed_address(address, "--temporal-metrics")
    metrics = PrometheusConfig(
        bind_address=address, counters_total_suffix=True, unit_suffix=True, durations_as_seconds=True
    )
    try:
        return Runtime(telemetry=TelemetryConfig(metrics=metrics))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Temporal's metrics cannot be served on {address} ({error}): give --temporal-metrics the address and a "
            "free port of this machine; a name is not taken"
        ) from error
