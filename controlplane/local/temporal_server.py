"""Chooses the Temporal server of a local cluster, and makes the command line of an embedded server.

If the user configured an address (by Temporal's own environment variables or profile file), that server is used.
Otherwise a ``temporal`` binary is found, downloaded or built, and runs as part of the cluster.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from controlplane.local import temporal_binary
from controlplane.local.waiting import Progress
from everstep.errors import ClusterError, EverstepError

DYNAMIC_CONFIG = {
    # Without this, queues are read at most 20 times a second, and most activities take 100 ms longer.
    "history.transferProcessorMaxPollRPS": "500",
    # Without this, timers and retries below 1 s take a full second.
    "history.timerProcessorMaxTimeShift": '"10ms"',
    "history.timerProcessorMaxPollRPS": "500",
    "history.visibilityProcessorMaxPollRPS": "500",
    # From its fourth attempt on, a workflow task gets more and more time, by default up to ten minutes more. If the
    # worker that has it dies then, e.g. on a host without CPU time, the workflow waits that long.
    "history.workflowTaskRetryMaxInterval": '"2s"',
    # With one partition, the latency stays low even on a busy machine.
    "matching.numTaskqueueReadPartitions": "1",
    "matching.numTaskqueueWritePartitions": "1",
}
"""Setting of the embedded server → its JSON value; docs/benchmarks/README.md has measurements of each setting."""

SQLITE_PRAGMAS = {"journal_mode": "WAL", "synchronous": "NORMAL"}


@dataclass(frozen=True)
class TemporalChoice:
    """The chosen server: the ``address`` of a running server, or a ``binary`` to start."""

    source: str
    """The source of the server, as text: ``"configured"``, ``"on PATH"``, ``"built with Go"``, …"""
    address: str = ""
    namespace: str = ""
    binary: Path | None = None


def configured() -> TemporalChoice | None:
    """The server that the user configured for Temporal's tools; None: none is configured.

    Raises:
        ClusterError: the profile file is damaged or names an unknown profile.
    """
    from temporalio.envconfig import ClientConfigProfile

    try:
        profile = ClientConfigProfile.load()
    except Exception as error:  # the core of the SDK raises RuntimeError and ValueError
        raise ClusterError(
            f"Temporal's configuration cannot be read ({error}): correct its profile file or the TEMPORAL_ variables"
        ) from error
    if not profile.address:
        return None
    return TemporalChoice("configured", address=profile.address, namespace=profile.namespace or "default")


def find(progress: Progress) -> TemporalChoice:
    """Find or obtain a server; a line of progress names it.

    Raises:
        ClusterError: there is no server, and it can be neither downloaded nor built.
    """
    if choice := configured():
        progress(f"Temporal: using the configured server {choice.address}")
        return choice
    binary, source = temporal_binary.installed(progress) or temporal_binary.obtain(progress)
    progress(f"Temporal: {binary} ({source}, server {temporal_binary.server_version(binary)})")
    return TemporalChoice(source, binary=binary)


def start_command(binary: Path, *, port: int, ui_port: int, database: Path, namespace: str) -> list[str]:
    """The command line of the embedded server with all settings, on loopback."""
    from controlplane.search_attributes import type_name
    from workflows import attributes

    command = [str(binary), "server", "start-dev", "--ip", "127.0.0.1"]
    command += ["--port", str(port), "--ui-port", str(ui_port), "--ui-disable-news-fetch"]
    command += ["--db-filename", str(database), "--namespace", namespace, "--log-level", "warn"]
    for name, value in SQLITE_PRAGMAS.items():
        command += ["--sqlite-pragma", f"{name}={value}"]
    for name, value in DYNAMIC_CONFIG.items():
        command += ["--dynamic-config-value", f"{name}={value}"]
    for key in attributes.ALL:
        command += ["--search-attribute", f"{key.name}={type_name(key)}"]
    return command


def main() -> int:
    """Make sure that a server is available: ``python -m controlplane.local.temporal_server``."""
    try:
        find(lambda line: print(line, flush=True))
    except EverstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
