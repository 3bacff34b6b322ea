"""Reads logs from files, folders, gzip files and standard input."""

from __future__ import annotations

import gzip
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from everstep.errors import ConfigError
from everstep.system import procfs

PIECE = 1 << 20
"""Bytes that are read at once."""
STANDARD_INPUT = "-"
SHELL_PIPES = ("/dev/fd/", f"{procfs.PROC}/self/fd/", "/dev/stdin")
"""Beginnings of the names of pipes that a shell has opened, e.g. for ``<(…)``: another program writes to them."""
GZIP = b"\x1f\x8b"


def log_files(names: list[str]) -> list[str]:
    """The logs of a command line: each file and ``-`` itself, and all files of each folder, sorted by name.

    Raises:
        ConfigError: there is no name, a name is neither file nor folder, or a folder has no file.
    """
    if not names:
        raise ConfigError("no log is given: name files or folders, or - for standard input")
    logs: list[str] = []
    for name in names:
        path = Path(name)
        if name == STANDARD_INPUT or path.is_file() or (name.startswith(SHELL_PIPES) and path.is_fifo()):
            logs.append(name)
        elif path.is_dir():
            inside = sorted(str(inner) for inner in path.rglob("*") if stat.S_ISREG(inner.lstat().st_mode))
            if not inside:
                raise ConfigError(f"the folder {name} has no files: name one that has logs")
            logs += inside
        elif path.exists():  # opening a pipe would wait for its writer, and a device may have no end
            raise ConfigError(f"{name} is not a regular file: pass it as standard input: - < {quote(name)}")
        else:
            raise ConfigError(f"there is no file or folder {name}: name logs, or - for standard input")
    return list(dict.fromkeys(logs))


def pieces(name: str) -> Iterator[bytes]:
    """The bytes of a log. A gzip file is unpacked; if it is cut off, its beginning is returned.

    Raises:
        ConfigError: the file cannot be read.
    """
    if name == STANDARD_INPUT:
        while data := sys.stdin.buffer.read(PIECE):
            yield data
        return
    try:
        with Path(name).open("rb") as file:
            source = gzip.GzipFile(fileobj=file) if file.peek(len(GZIP))[: len(GZIP)] == GZIP else file
            while data := source.read1(PIECE):
                yield data
    except (EOFError, zlib.error):
        return
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
