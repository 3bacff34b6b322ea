"""Reads git: a folder's files, its newest commit, the tree of a revision, and the commits between two revisions.

The folder may belong to any user, so git is called in such a way that it runs no program named in the folder's
settings.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.base.text import first_of
from everstep.errors import ConfigError
from everstep.model.version import Origin

LIMIT_S = 60.0
"""The time limit of a git command, seconds: the folder may be on storage that hangs."""
_NOTHING_IS_RUN = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_READS_FILES = ("status",)
"""Commands that read files of the work tree, and so run the programs of filters."""
_LINK, _SUBMODULE, _EXECUTABLE = "120000", "160000", "100755"
NAMED = 4
"""The largest number of commits between two versions that are named; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of a revision."""

    path: str
    """The path, relative to the folder."""
    kind: str
    """The kind, as in :class:`everstep.system.code_archive.CodeFile`."""
    bytes: int
    folder: Path
    """The folder of the repository that has the file."""
    id: str


class GitFolder:
    """A folder in the work tree of a git repository.

    Args:
        folder: The folder; it may be below the top of the work tree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[str]:
        """Return the files below the folder that git does not ignore, including the files of submodules.

        Raises:
            ConfigError: git failed.
        """
        found = []
        for name in self._listed("ls-files", "-z", "--cached", "--others", "--exclude-standard"):
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():  # a repository within this one
                inner = name.rstrip("/")
                if (path / ".git").exists():
                    found += [f"{inner}/{below}" for below in GitFolder(path).files()]
            elif path.is_symlink() or path.exists():  # a tracked file may be removed without a commit
                found.append(name)
        return sorted(set(found))  # git lists a file in conflict once for each side

    def origin(self, revision: str = "HEAD") -> Origin:
        """Return the commit of a revision; an empty origin if there is no commit yet.

        Raises:
            ConfigError: git failed.
        """
        if revision == "HEAD" and not self._text("rev-parse", "--verify", "--quiet", "HEAD", may_fail=True):
            return Origin(folder=str(self.folder))
        shown = self._text("log", "-1", "--no-show-signature", "--format=%H%x00%an <%ae>%x00%s", revision)
        commit, author, subject = shown.rstrip("\n").split("\0")
        return Origin(folder=str(self.folder), commit=commit, author=author[:200], subject=subject[:200])

    def is_dirty(self) -> bool:
        """Return whether files below the folder differ from the newest commit, or are not in it.

        Raises:
            ConfigError: git failed.
        """
        options = ("--porcelain", "-z", "--untracked-files=normal", "--ignore-submodules=dirty")
        return bool(self._text("status", *options, "--", ".")) or any(inner.is_dirty() for inner in self._submodules())

    def _submodules(self) -> list[GitFolder]:
        """Return the submodules that are there. Git itself must not enter them: it would obey their settings."""
        entries = (entry.split("\t", 1) for entry in self._listed("ls-files", "-z", "--stage"))
        paths = [self.folder / path for kind, path in entries if kind.startswith(_SUBMODULE)]
        return [GitFolder(path) for path in paths if (path / ".git").exists()]

    def resolved(self, revision: str) -> str:
        """Return the id of the commit that a revision names.

        Raises:
            ConfigError: there is no such commit here.
        """
        if revision.startswith("-"):
            raise ConfigError(f"{revision!r} is not a revision: name a commit, a branch or a tag")
        found = self._text("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", may_fail=True).strip()
        if not found:
            raise ConfigError(
                f"the git repository of {self.folder} has no revision {revision!r}: "
                f"see 'git -C {self.folder} log --all', or fetch it first"
            )
        return found

    def tree(self, commit: str) -> list[Blob]:
        """Return the files of a commit below the folder.

        Raises:
            ConfigError: git fails, a file is missing in the repository, or a submodule is missing in the folder.
        """
        blobs = []
        for entry in self._listed("ls-tree", "-r", "-z", "-l", commit, "--", "."):
            about, name = entry.split("\t", 1)
            mode, _, identifier, size = about.split()
            if mode == _SUBMODULE:
                inner = GitFolder(self.folder / name)
                if not (inner.folder / ".git").exists():
                    raise ConfigError(
                        f"{name} in {self.folder} is a submodule without its files: "
                        f"'git -C {self.folder} submodule update --init', or give a folder with --code DIR"
                    )
                blobs += [
                    Blob(f"{name}/{blob.path}", blob.kind, blob.bytes, blob.folder, blob.id)
                    for blob in inner.tree(inner.resolved(identifier))
                ]
            elif not size.isdecimal():
                raise _unreadable(self.folder, name, identifier)
            else:
                kind = "l" if mode == _LINK else "x" if mode == _EXECUTABLE else "f"
                blobs.append(Blob(name, kind, int(size), self.folder, identifier))
        return blobs

    def between(self, before: str, after: str) -> str:
        """Return the commits from one commit to another, as text; empty: there are none, or a commit is unknown here.

        Raises:
            ConfigError: git failed.
        """
        known = all(self._text("cat-file", "-t", one, may_fail=True).strip() == "commit" for one in (before, after))
        if before == after or not known:
            return ""
        count = int(self._text("rev-list", "--count", f"{before}..{after}"))
        lines = self._text("log", "--no-show-signature", f"-{NAMED}", "--format=%h %s (%an)", f"{before}..{after}")
        taken_back = int(self._text("rev-list", "--count", f"{after}..{before}"))
        text = first_of((line[:120] for line in lines.splitlines()), count, noun="commits", separator="; ")
        back = f"{taken_back} commits are removed" if taken_back else ""
        return "; ".join(filter(None, (text, back)))

    def _text(self, *arguments: str, may_fail: bool = False) -> str:
        return _git(self.folder, *arguments, may_fail=may_fail).decode(errors="replace")

    def _listed(self, *arguments: str) -> list[str]:
        """Return git's output, split at NUL bytes; names that are not UTF-8 are decoded as for the file system."""
        return [os.fsdecode(entry) for entry in _git(self.folder, *arguments).split(b"\0") if entry]


def read_blobs(blobs: list[Blob]) -> Iterator[bytes]:
    """Yield the contents of files, in order.

    Raises:
        ConfigError: a file cannot be read.
    """
    running: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for blob in blobs:
            if blob.folder not in running:
                running[blob.folder] = subprocess.Popen(
                    _command(blob.folder, "cat-file", "--batch"),
                    env=_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            process = running[blob.folder]
            assert process.stdin
            assert process.stdout
            process.stdin.write(f"{blob.id}\n".encode())
            process.stdin.flush()
            header = process.stdout.readline().split()
            if len(header) != 3 or header[1] != b"blob":
                raise _unreadable(blob.folder, blob.path, blob.id)
            contents = process.stdout.read(int(header[2]))
            process.stdout.read(1)
            yield contents
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def _unreadable(folder: Path, path: str, identifier: str) -> ConfigError:
    return ConfigError(
        f"git in {folder} cannot read {path} ({identifier[:12]}): run 'git fsck' there. If it is a partial clone, "
        "check the revision out first, since no file is fetched here"
    )


def work_tree_of(folder: Path) -> Path | None:
    """Return the top of the git work tree that has the folder; None: there is none."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)


def _git(folder: Path, *arguments: str, may_fail: bool = False) -> bytes:
    variables = _without_filters(folder) if arguments[0] in _READS_FILES else {}
    try:
        ended = subprocess.run(
            _command(folder, *arguments),
            env=_environment() | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is in a git repository, but git is not installed here: "
            "install git, or copy the code to a folder outside of the repository"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"'git {arguments[0]}' in {folder} took longer than {LIMIT_S:g} s: have git ignore other files than code, "
            "or name a smaller folder with --code DIR"
        ) from None
    if ended.returncode and not may_fail:
        errors = ended.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"'git {arguments[0]}' in {folder}: {errors[0] if errors else 'failed'}")
    return b"" if ended.returncode else ended.stdout


def _command(folder: Path, *arguments: str) -> list[str]:
    return ["git", "--no-replace-objects", *_NOTHING_IS_RUN, "-C", str(folder), *arguments]


def _without_filters(folder: Path) -> dict[str, str]:
    """Return variables that switch off the filters in the folder's settings: git runs their programs to compare files.

    They are variables and not options, since the name of a filter may contain any character.
    """
    found = _git(folder, "config", "--null", "--name-only", "--get-regexp", r"^filter\.", may_fail=True)
    names = sorted({os.fsdecode(name).split(".", 1)[1].rpartition(".")[0] for name in found.split(b"\0") if name})
    off = {"clean": "", "smudge": "", "process": "", "required": "false"}
    settings = [(f"filter.{name}.{key}", value) for name in names for key, value in off.items()]
    variables = {"GIT_CONFIG_COUNT": f"{len(settings)}"}
    for number, (key, value) in enumerate(settings):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables


def _environment() -> dict[str, str]:
    """Return this process's environment without variables that name another repository, e.g. within a hook."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Without an allowed protocol, git does not fetch objects that a partial clone lacks. A fetch would run a program
    # that the folder's settings name, and these settings can overrule the option protocol.allow, but not the variable.
    forbidden = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
    return kept | forbidden | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat"}
