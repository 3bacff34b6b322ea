"""Reads the TOML files that people write: job files, inventories, settings of inspections, receivers of notices."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import ConfigError

if TYPE_CHECKING:
    from activities.notices.settings import NoticeSettings
    from agent.monitor.settings import MonitorSettings


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Read the contents of a file.

    Args:
        path: Path of the file.
        kind: Kind of file in messages, e.g. ``"job file"``.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML; the message names a remedy.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {kind} {path}: check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: name the {kind} in it") from None
    except OSError as error:
        raise ConfigError(f"the {kind} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {kind} {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        hint = "; a script goes after '--': everstep run -- train.py" if path.suffix == ".py" else ""
        raise ConfigError(f"the {kind} {path} is not TOML: {error}{hint}") from error


def monitor_settings(path: Path | None) -> MonitorSettings:
    """The settings of inspections in a file; without a file, the defaults.

    Raises:
        ConfigError: it cannot be read, or has an unknown name; the message lists the known names.
    """
    from agent.monitor.settings import MonitorSettings

    if path is None:
        return MonitorSettings()
    from agent.monitor.all import known, reason_codes  # imported here: most commands need no inspections

    kinds = {name: kind.limits_type for name, kind in known().items()}
    table = read_toml(path, "file with the monitor's settings")
    return MonitorSettings.parse(table, kinds, reason_codes(), str(path))


def notice_settings(path: Path | None) -> NoticeSettings:
    """The receivers of notices in a file; without a file, there are none.

    Raises:
        ConfigError: it cannot be read, or has errors; the message lists all of them.
    """
    from activities.notices.settings import NoticeSettings

    if path is None:
        return NoticeSettings()
    return NoticeSettings.parse(read_toml(path, "file with the receivers of notices"), os.environ, str(path))
