"""The file with the settings of the agents' inspections."""

from __future__ import annotations

from pathlib import Path

from agent.monitor.settings import MonitorSettings
from controlplane.toml_file import read_toml


def monitor_settings(path: Path | None) -> MonitorSettings:
    """The settings of inspections in a file; without a file, the defaults.

    Raises:
        ConfigError: it cannot be read, or has an unknown name; the message lists the known names.
    """
    if path is None:
        return MonitorSettings()
    from agent.monitor.all import known, reason_codes  # imported here: most commands need no inspections

    kinds = {name: kind.limits_type for name, kind in known().items()}
    table = read_toml(path, "file with the monitor's settings")
    return MonitorSettings.parse(table, kinds, reason_codes(), str(path))
