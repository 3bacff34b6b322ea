"""The logs that a command line names, and how they are read."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from everstep.errors import ConfigError
from everstep.system.log_files import log_files, pieces


def test_a_folder_means_all_its_files_and_no_file_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "attempt_0/3").mkdir(parents=True)
    for name in ("a.log", "attempt_0/3/stderr.log"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "link").symlink_to("a.log")

    found = log_files([str(tmp_path), str(tmp_path / "a.log")])
    assert [str(Path(name).relative_to(tmp_path)) for name in found] == ["a.log", "attempt_0/3/stderr.log"]


def test_a_compressed_log_is_recognized_and_a_truncated_one_ends_early(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(gzip.compress(b"step 1\n" * 99))
    assert b"".join(pieces(str(log))) == b"step 1\n" * 99
    log.write_bytes(log.read_bytes()[:-4])
    assert b"".join(pieces(str(log))) == b"step 1\n" * 99
    log.write_bytes(b"")
    assert b"".join(pieces(str(log))) == b""


def test_an_unreadable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder"):
        log_files([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(pieces(str(tmp_path)))


@pytest.mark.timeout(20)
def test_a_named_pipe_is_refused_with_a_remedy(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "link").symlink_to("a pipe")
    for name in ("a pipe", "link"):
        with pytest.raises(ConfigError, match=r"is not a regular file: .* standard input: - < '?/"):
            log_files([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="is not a regular file"):
        log_files(["/dev/zero"])


def test_a_file_descriptor_of_the_shell_is_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"step 1\n")
    os.close(write)
    [name] = log_files([f"/dev/fd/{read}"])
    assert b"".join(pieces(name)) == b"step 1\n"
    os.close(read)
