"""Run the faults of ``injected_faults.py`` and keep what they write. Root is needed for the small file systems."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.everstep.decisions.blame.classify.injected_faults import FAULTS

LIMITS = {"many-files": "ulimit -n 64", "many-threads": "ulimit -v 1000000"}
"""What the kernel refuses a program of that name."""


def start(name: str, script: Path, log: Path, **more: str) -> subprocess.Popen[bytes]:
    """One process with its output in a file."""
    command = [sys.executable, "-u", str(script)]
    if name in LIMITS:
        command = ["sh", "-c", f"{LIMITS[name]}; exec {' '.join(command)}"]
    if name == "read-only":
        more["READ_ONLY"] = "/mnt"
        command = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o ro none /mnt && exec {' '.join(command)}"]
    if name == "worker-shm":
        command = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=8m none /dev/shm && exec {' '.join(command)}"]
    environment = os.environ | more
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def run(name: str, folder: Path, small: Path) -> None:
    """One fault: a file ``NAME.log``, or a folder ``NAME`` with a file for each rank; prints the exit codes."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        if name != "script-missing":
            script.write_text(FAULTS[name])
        if not name.startswith("ranks-"):
            print(name, start(name, script, folder / f"{name}.log").wait(timeout=60), flush=True)
            return
        (folder / name).mkdir(exist_ok=True)
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29620 + list(FAULTS).index(name)), "WORLD_SIZE": "3"}
        more |= {"SMALL": str(small), "LIMIT": "6" if name == "ranks-hang" else "60", "OMP_NUM_THREADS": "1"}
        started = [start(name, script, folder / name / f"rank-{rank}.log", RANK=str(rank), **more) for rank in range(3)]
        print(name, [process.wait(timeout=90) for process in started], flush=True)


def neutral(folder: Path) -> None:
    """Paths of the machine that ran them become those of nobody."""
    for path in (path for path in folder.rglob("*.log") if path.is_file()):
        data = path.read_bytes().replace(sys.prefix.encode(), b"/venv").replace(sys.base_prefix.encode(), b"/usr")
        path.write_bytes(re.sub(rb"/tmp/tmp\w+/", b"/job/", data))


def main() -> None:
    """All of them, or those that are named."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(FAULTS)
    with tempfile.TemporaryDirectory() as small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True)
        try:
            for name in names:
                run(name, folder, Path(small))
        finally:
            subprocess.run(["umount", small], check=True)
            neutral(folder)


if __name__ == "__main__":
    main()
