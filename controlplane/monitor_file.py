"""The file with the settings of the inspections of agents."""

from __future__ import annotations

from pathlib import Path

from agent.monitor.settings import MonitorSettings
from controlplane.toml_file import read_toml


def monitor_settings(path: Path | None) -> MonitorSettings:
    """What a file says of the inspections; without one, the defaults.

    Raises:
        ConfigError: it cannot be read, or names what there is not; the message says what there is.
    """
    if path is None:
        return MonitorSettings()
    from agent.monitor.all import known, reason_codes  # here: most commands need no inspections

    kinds = {name: kind.limits_type for name, kind in known().items()}
    table = read_toml(path, "file with the monitor's settings")
    return MonitorSettings.parse(table, kinds, reason_codes(), str(path))
