"""This module reads the variables that ``env_from`` names, from a file or from the environment of this machine's agent.

No message and no record contains the values of these variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep.errors import ConfigError


def read_variables(
    names: Sequence[str], file: str, machine: str, own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the named variables, each from the file, else from the agent's environment. Waits for a disk.

    Args:
        names: Names of the variables.
        file: Path of a file with lines ``NAME=value``; empty: none.
        machine: This machine's name, for messages.
        own: The agent's environment; by default this process's.

    Raises:
        ConfigError: the file cannot be read, or a variable is neither in the file nor in the environment. The message
            names the machine and the variable, but no value.
    """
    own = os.environ if own is None else own
    listed = _read(Path(file), machine) if file else {}
    missing = [name for name in names if name not in listed and name not in own]
    if missing:
        places = f"neither in {file} nor in the environment of the agent" if file else "not in the agent's environment"
        raise ConfigError(
            f"{', '.join(missing)}, which env_from names, {'is' if len(missing) == 1 else 'are'} {places} "
            f"on {machine}: add {'it' if len(missing) == 1 else 'them'} there"
            + ("" if file else ", start the agent anew, or name a file with env_file")
        )
    return {name: listed.get(name, own.get(name, "")) for name in names}


def _read(file: Path, machine: str) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"env_file {file} cannot be read on {machine}: {reason}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"line {number} of env_file {file} on {machine} is not NAME=value")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        found[name] = value[1:-1] if quoted else value
    return found
