"""Metrics of a worker for Prometheus: its own metrics, and those of Temporal's SDK on a second port."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

import everstep
from activities.heartbeat import steady_ns
from activities.ledger.machine_events import EventWriter
from activities.ledger.time_spent import TimeSpent
from activities.watching.training_time import TrainingTimes
from activities.watching.watcher import Watcher
from agent.exposition import MetricsServer, Samples, described, parsed_address
from everstep.errors import ConfigError

KINDS = {"report": "anomaly", "finished": "finished"}
"""Update of a job's workflow → the kind of report that it carries."""

METRICS = described(
    ("worker_info", "version task_queue", "1"),
    ("jobs_watched", "", "jobs that this worker watches"),
    ("machines_watched", "job", "machines of a job that is watched"),
    ("agents_silent", "job", "machines of a watched job whose agents do not answer"),
    ("job_ettr_ratio", "job since", "share of time in which a job trained, since its start or within the last hour"),
    ("job_lost_seconds", "job since cause", "time in which a job did not train, by cause"),
    ("reports_total", "kind", "acknowledged reports to jobs (anomaly, finished); every worker counts all of them"),
    ("ledger_events_waiting", "", "events of machines that are not in the ledger yet"),
)
"""The metrics that a worker serves."""
OF_TEMPORAL = {
    "temporal_workflow_task_execution_latency_seconds_bucket": "how long workflow tasks take",
    "temporal_workflow_task_execution_failed_total": "workflow tasks that failed",
    "temporal_activity_execution_failed_total": "attempts of activities that failed",
    "temporal_activity_schedule_to_start_latency_seconds_bucket": "how long activities wait for a worker",
    "temporal_request_failure_total": "calls of Temporal that failed",
}
"""Metrics of Temporal's SDK that the dashboard uses."""


def samples_of(watcher: Watcher, events: EventWriter, times: TrainingTimes, task_queue: str) -> Samples:
    """The present values of a worker's metrics; called in its event loop."""
    samples = Samples(METRICS)
    samples.add("worker_info", 1, version=everstep.__version__, task_queue=task_queue)
    samples.add("jobs_watched", len(watcher.watched))
    now_ns = steady_ns()
    for job in watcher.watched.values():
        name = {"job": job.spec.name}
        samples.add("machines_watched", len(job.machines), **name)
        samples.add("agents_silent", len(job.silent(now_ns)), **name)
    for workflow_id, (since_start, last_hour) in times.spent.items():
        _add_times(samples, {"job": workflow_id.removeprefix("job/")}, {"start": since_start, "hour": last_hour})
    for update, kind in KINDS.items():
        samples.add("reports_total", watcher.reported[update], kind=kind)
    samples.add("ledger_events_waiting", events.waiting)
    return samples


def _add_times(samples: Samples, name: dict[str, str], spent: dict[str, TimeSpent]) -> None:
    """Add the time of a job by cause, since its start and within the last hour."""
    for since, time in spent.items():
        if (ratio := time.ettr.ratio) is not None:
            samples.add("job_ettr_ratio", ratio, **name, since=since)
        for cause, seconds in time.causes.items():
            if cause != "productive":
                samples.add("job_lost_seconds", seconds, **name, since=since, cause=cause)


def metrics_server(
    address: str, watcher: Watcher, events: EventWriter, times: TrainingTimes, task_queue: str
) -> MetricsServer:
    """The server of a worker's metrics.

    Raises:
        ConfigError: the address is not valid.
    """
    of_process = ProcessCollector(registry=CollectorRegistry())
    return MetricsServer(address, lambda: samples_of(watcher, events, times, task_queue), [of_process])


def temporal_runtime(address: str) -> Runtime:
    """A runtime of Temporal's SDK that serves metrics on its own port.

    Names and units follow the rules of Prometheus: counters end with ``_total``, durations are in seconds.

    Args:
        address: ``host:port``, where the host is an IP address.

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
            f"Temporal's metrics cannot be served on {address} ({error}): give --temporal-metrics an IP address of "
            "this machine with a free port, and not a host name"
        ) from error
