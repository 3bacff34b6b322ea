"""Makes the virtual environments of the peers in the cache folder; they share the installed torch with everstep."""

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
"""Longest time of one command, seconds."""


def python(name: str, packages: tuple[str, ...], module: str) -> Path:
    """Return the interpreter of a peer's environment; make the environment if it is missing or has other packages.

    Args:
        name: Name of the environment's folder.
        packages: Packages with versions, which pip installs without their dependencies.
        module: A module that must be importable afterwards.

    Raises:
        PeerFailed: the packages cannot be installed or imported.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep" / "benchmarks"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"{name}-py{version.replace('.', '')}"
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    # A path file makes our torch visible: its 5 GB are not installed twice, and the versions are the same.
    path_file = folder / "lib" / f"python{version}" / "site-packages" / "torch_of_everstep.pth"
    path_file.write_text(sysconfig.get_path("purelib") + "\n")
    imports = [str(interpreter), "-W", "ignore", "-c", f"import {module}"]
    stamp = folder / "everstep-packages"
    wanted = "\n".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"installing {packages[0]} into {folder}, which takes some seconds")
        _run(
            [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *packages]
        )
        _run(imports)
        stamp.write_text(wanted)
    else:
        _run(imports)
    return interpreter


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.CalledProcessError as error:
        raise PeerFailed(f"{shlex.join(command)} failed: {error.stderr.strip()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"{shlex.join(command)} took longer than {INSTALL_LIMIT_S} s") from error
