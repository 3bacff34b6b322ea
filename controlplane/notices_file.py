"""The file that says who is told of events."""

from __future__ import annotations

import os
from pathlib import Path

from activities.notices.settings import NoticeSettings
from controlplane.toml_file import read_toml


def notice_settings(path: Path | None) -> NoticeSettings:
    """The receivers of a file; without one, none.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong; the message says all of that.
    """
    if path is None:
        return NoticeSettings()
    return NoticeSettings.parse(read_toml(path, "file with the receivers of notices"), os.environ, str(path))
