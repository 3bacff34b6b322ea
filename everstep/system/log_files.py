"""Logs as they lie on disk: files, folders of files, compressed ones, standard input."""

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
HANDED = ("/dev/fd/", f"{procfs.PROC}/self/fd/", "/dev/stdin")
"""Pipes that a shell has opened, as for ``<(…)``: another program writes them."""
GZIP = b"\x1f\x8b"


def log_files(given: list[str]) -> list[str]:
    """The logs that are meant: files and ``-`` as they are, of folders all files in them, by name.

    Raises:
        ConfigError: nothing was given, something does not exist or is no file, or a folder has no file.
    """
    if not given:
        raise ConfigError("no log is given: name files or folders, or - for standard input")
    found: list[str] = []
    for name in given:
        path = Path(name)
        if name == STANDARD_INPUT or path.is_file() or (name.startswith(HANDED) and path.is_fifo()):
            found.append(name)
        elif path.is_dir():
            inside = sorted(str(inner) for inner in path.rglob("*") if stat.S_ISREG(inner.lstat().st_mode))
            if not inside:
                raise ConfigError(f"the folder {name} has no files: name one that has logs")
            found += inside
        elif path.exists():  # opening a pipe waits for its writer, a device may have no end
            raise ConfigError(f"{name} is no regular file: give its lines to standard input: - < {quote(name)}")
        else:
            raise ConfigError(f"there is no file or folder {name}: name logs, or - for standard input")
    return list(dict.fromkeys(found))


def pieces(name: str) -> Iterator[bytes]:
    """The bytes of a log, unpacked where it is a gzip file; one that was cut off is read as far as it goes.

    Raises:
        ConfigError: it cannot be read.
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
