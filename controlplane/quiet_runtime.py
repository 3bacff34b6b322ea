"""The runtime of Temporal's SDK in commands."""

from __future__ import annotations

import functools

from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter


@functools.cache
def quiet_runtime() -> Runtime:
    """The SDK's runtime for a terminal: it logs errors only, since everstep reports retries itself."""
    errors = LoggingConfig(filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"))
    return Runtime(telemetry=TelemetryConfig(logging=errors))
