"""Reading TOML files that people write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from everstep.errors import ConfigError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read the contents of a file.

    Args:
        path: Path of the file.
        what: Kind of file in messages, e.g. ``"job file"``.

    Raises:
        ConfigError: it is missing, unreadable or not TOML; the message names a remedy.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} {path}: check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: name the {what} in it") from None
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        hint = "; a script goes after '--': everstep run -- train.py" if path.suffix == ".py" else ""
        raise ConfigError(f"the {what} {path} is not TOML: {error}{hint}") from error
