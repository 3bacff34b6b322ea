"""Runs the parts one after the other, each with a time limit, and prints a table of all results.

A part that fails gives one row that says why, and the next part runs. Without a GPU only the parts that need none run,
with small sizes. Such figures mean nothing for GPUs.

    python -P -m benchmarks.gpu
    python3 -P -m benchmarks.gpu --json gpu.json
    python -P -m benchmarks.gpu --python /opt/cuda/bin/python3 --part 'saves of 8 GB' --part Xid
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import environment, say
from benchmarks.gpu.parts import PARTS, Line, Part, named

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted({package for part in PARTS for package in part.packages})
LOOK = """
import importlib.util, json, sys
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
look = {"packages": found, "python": sys.version.split()[0], "torch": "", "gpu": ""}
if "torch" in found:
    import torch
    look["torch"] = torch.__version__
    if torch.cuda.is_available():
        look["gpu"] = torch.cuda.get_device_name()
print(json.dumps(look))
"""
"""A program that prints what a Python has."""
GRACE_S = 10.0
"""Time in which a part has to end its own processes after its time limit, seconds."""


def main() -> None:
    """Run the parts and print the results."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="Python with torch that runs the parts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a file")
    parser.add_argument("--part", action="append", metavar="NAME", help="run only this part; can be repeated")
    options = parser.parse_args()
    try:
        parts = [named(name) for name in options.part] if options.part else list(PARTS)
        look = look_at(options.python)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        parser.error(str(error))
    results: list[tuple[str, Line]] = []
    for part in parts:
        began = time.monotonic()
        lines = run(part, options.python, look)
        results += [(part.name, line) for line in lines]
        say(f"{part.name}: {time.monotonic() - began:.0f} s")
    where = environment() | {key: look[key] for key in ("python", "torch", "gpu")}
    show(where, results)
    if options.json:
        rows = [{"part": part, **asdict(line)} for part, line in results]
        options.json.write_text(json.dumps({"benchmark": "gpu", "environment": where, "rows": rows}, indent=2))


def look_at(python: str) -> dict[str, Any]:
    """Return the packages and the GPU that a Python has.

    Raises:
        OSError, subprocess.CalledProcessError: the Python does not run.
    """
    command = [python, "-P", "-c", LOOK, *PACKAGES]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def why_not(part: Part, look: dict[str, Any]) -> str:
    """Return why a part cannot run; empty: it can."""
    missing = [package for package in part.packages if package not in look["packages"]]
    if missing:
        return f"needs {', '.join(missing)}, which this Python does not have"
    return "needs a GPU" if part.needs_gpu and not look["gpu"] else ""


def run(part: Part, python: str, look: dict[str, Any]) -> list[Line]:
    """Run one part, and return its results; the last one says why the part is not complete, if it is not."""
    if why := why_not(part, look):
        return [Line("left out", None, why=why)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [python, "-P", "-m", "benchmarks.gpu.parts", part.name, "gpu" if look["gpu"] else "small"]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=errors, start_new_session=True, text=True
        )
        try:
            code = process.wait(part.limit_s)
            why = f"failed with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"did not end within {part.limit_s} s"
        finally:
            end(process)
        lines = [Line(**json.loads(line)) for line in read(output) if line.startswith("{")]
        if why:
            last = [line for line in read(errors) if line.strip()][-1:]
            lines.append(Line("not complete", None, why=": ".join([why, *last])))
    return lines


def end(process: subprocess.Popen[str]) -> None:
    """End a part: it gets time to end the processes that it started, and then is killed with its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(file: Any) -> list[str]:
    """Return the complete lines of a file."""
    file.seek(0)
    return [line[:-1] for line in file.readlines() if line.endswith("\n")]


def show(where: dict[str, Any], results: Sequence[tuple[str, Line]]) -> None:
    """Print the results as a table, one block for each part."""
    print(f"{where['gpu'] or 'no GPU'}: {where['cores']} cores, {where['memory_gib']} GiB, load {where['load']}")
    print(f"{where['date']}, python {where['python']}, torch {where['torch']}; {where['command']}")
    width = max(len(line.name) for _, line in results)
    shown = ""
    for part, line in results:
        if part != shown:
            print(f"\n{part:{width + 2}} {'value':>10} {'peer':>10}")
        shown = part
        print(f"  {line.name:{width}} {text(line.value):>10} {text(line.peer):>10}  {line.unit:7} {line.why}".rstrip())


def text(value: float | str | None) -> str:
    """Return a value as it is shown."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


if __name__ == "__main__":
    main()
