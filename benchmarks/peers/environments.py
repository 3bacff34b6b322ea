"""Environments of the peers' own, kept in the cache folder, with the torch that everstep is measured with."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.common import say
from benchmarks.peers.torchrun import PeerFailed

INSTALL_LIMIT_S = 600


def python(name: str, packages: tuple[str, ...], module: str) -> Path:
    """The interpreter of a peer's environment, made when it is not there or has other packages.

    Args:
        name: Of its folder.
        packages: What pip installs, without their dependencies; with versions, for others have to get the same
            figures. A tuple: text would be taken for a sequence of packages of one letter each.
        module: What must be importable afterwards.

    Raises:
        PeerFailed: it cannot be installed, or not imported.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep" / "benchmarks"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"{name}-py{version.replace('.', '')}"
    found = folder / "bin" / "python"
    if not found.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    # The same torch as ours, seen through a path file: 5 GB are not installed twice, and versions cannot differ.
    own = folder / "lib" / f"python{version}" / "site-packages" / "torch_of_everstep.pth"
    own.write_text(sysconfig.get_path("purelib") + "\n")
    imports = [str(found), "-W", "ignore", "-c", f"import {module}"]
    stamp = folder / "everstep-packages"
    wanted = "\n".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"installing {packages[0]} into {folder} (seconds)")
        _run([str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *packages])
        _run(imports)
        stamp.write_text(wanted)
    else:
        _run(imports)
    return found


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.CalledProcessError as error:
        raise PeerFailed(f"{shlex.join(command)} failed: {error.stderr.strip()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"{shlex.join(command)} took longer than {INSTALL_LIMIT_S} s") from error
