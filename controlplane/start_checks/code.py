"""The code of a job that starts: a snapshot of its folder is its first version.

A job may also import code from outside its folder: from PYTHONPATH, or from an editable install. No version records a
change of such code, so the user is warned.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from activities.versions.listing import files_of
from controlplane.client import Control
from everstep.base.text import listed
from everstep.errors import ConfigError
from everstep.model.job import IN_PLACE, JobSpec
from everstep.model.machine import Machine
from everstep.model.version import JobVersion, UpdateRequest, VersionStatus
from everstep.rank import environment

NAMED = 4
"""Number of folders that a warning names."""
READ_FILES, READ_BYTES = 500, 200_000
"""At most this many files of a folder are searched for imports, and at most this many bytes of each file."""
OURS = "everstep"
"""Name of everstep's own package, which is left out of the warning."""
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+([\w., \t]+))", re.MULTILINE)


async def first_version(
    control: Control, spec: JobSpec, say: Callable[[str], None] = lambda _: None
) -> tuple[JobSpec, list[JobVersion], str]:
    """Make the first version of a job's code.

    Args:
        control: Connection to the cluster.
        spec: The job.
        say: Shows the progress of a long snapshot.

    Returns:
        The job with this version, the version (none if the code runs in place), and a note for the user, or "".

    Raises:
        ConfigError: no version can be made of the folder; the message has the reason and a remedy.
        VersionStoreError: the store of versions does not accept it.
    """
    own = spec.model_copy(update={"code": "", "version": 1})
    if spec.code == IN_PLACE:
        return own, [], ""
    if not control.versions_url:
        if spec.code:
            raise ConfigError(
                f"code is {spec.code}, but the store of versions is not known here: set {environment.VERSIONS} to the "
                "value that the workers have, or run the code in place (--in-place)"
            )
        note = f"the code runs in place and is not recorded: set {environment.VERSIONS} to the store of versions"
        return own, [], note
    from activities.versions.make import first_version as made
    from activities.versions.progress import showing_progress
    from activities.versions.store import VersionStore

    folder = Path(spec.code) if spec.code else Path(spec.script).parent
    async with showing_progress(say) as progress:
        runs = await made(own, folder, VersionStore(control.versions_url), progress)
    runs = runs.model_copy(update={"packages": {}})
    request = UpdateRequest(operator=getpass.getuser())
    first = JobVersion(number=1, runs=runs, request=request, status=VersionStatus.RUNNING, asked_ns=time.time_ns())
    return runs.applied(spec, 1), [first], outside_code(spec, folder)


async def start_recorded(control: Control, spec: JobSpec, machines: Sequence[Machine]) -> None:
    """Start a job at step 0 with a snapshot of its code, as ``everstep run`` does.

    Raises:
        ConfigError: no version can be made of the folder, or a job of this name is running.
        VersionStoreError: the store of versions does not accept it.
        ClusterError: Temporal does not answer.
    """
    spec, versions, _ = await first_version(control, spec)
    await control.start_job(spec, machines, versions=versions)


def outside_code(spec: JobSpec, folder: Path) -> str:
    """A warning about imported code that is not in a snapshot of the folder; empty: this machine has no such code.

    Args:
        spec: The job before any snapshot; it is checked as it would run on this machine.
        folder: The folder of the snapshot.

    Raises:
        ConfigError: the folder cannot be read.
    """
    names = _imported(folder) - {OURS}
    inside = folder.resolve()
    folders = [
        f"{path} ({source})"
        for path, source in [*_by_path(spec), *([] if spec.python else _editable())]
        if any(_has_module(path, name) for name in names) and path.resolve() != inside
    ]
    if not folders:
        return ""
    return (
        f"warning: code in {listed(folders, NAMED)} is not part of the job's version, so that a change of it is not "
        "recorded. Move it into the folder (--code DIR names another folder), or install it as a package"
    )


def _by_path(spec: JobSpec) -> Iterator[tuple[Path, str]]:
    """The folders in the job's own PYTHONPATH."""
    for entry in spec.env.get("PYTHONPATH", "").split(os.pathsep):
        path = Path(entry)
        if entry and path.is_absolute() and not {"site-packages", "dist-packages"} & {*path.parts}:
            yield path, "PYTHONPATH"


def _editable() -> Iterator[tuple[Path, str]]:
    """The folders of distributions with an editable install."""
    for distribution in distributions():
        if (folder := _editable_folder(distribution)) and distribution.name != OURS:
            source = folder / "src"
            yield (source if source.is_dir() else folder), f"{distribution.name}, an editable install"


def _editable_folder(distribution: Distribution) -> Path | None:
    try:
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = urlsplit(direct["url"]) if direct["dir_info"]["editable"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(unquote(url.path)) if url and url.scheme == "file" else None


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _imported(folder: Path) -> set[str]:
    """The modules and packages that a folder's files import and that are not in the folder."""
    names: set[str] = set()
    sources = (name for name in files_of(folder) if name.endswith(".py"))
    for source in islice(sources, READ_FILES):
        try:
            with (folder / source).open("rb") as file:
                text = file.read(READ_BYTES)
        except OSError:
            continue
        for package, modules in _IMPORT.findall(text):  # of 'from package import …' and of 'import modules'
            words = [package] if package else [part.split()[0] for part in modules.split(b",") if part.split()]
            names |= {word.partition(b".")[0].decode() for word in words}
    return {name for name in names if not _has_module(folder, name)}
