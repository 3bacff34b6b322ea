"""The file with the receivers of notices."""

from __future__ import annotations

import os
from pathlib import Path

from activities.notices.settings import NoticeSettings
from controlplane.toml_file import read_toml


def notice_settings(path: Path | None) -> NoticeSettings:
    """The receivers in a file; without a file, there are none.

    Raises:
        ConfigError: it cannot be read, or has errors; the message lists all of them.
    """
    if path is None:
        return NoticeSettings()
    return NoticeSettings.parse(read_toml(path, "file with the receivers of notices"), os.environ, str(path))
