"""Breaks one piece of code at a time and checks that a test fails: ``make mutants [ONLY=words]``.

``mutants.toml`` lists the changes, which are called mutants. Each guarantee of docs/concepts/checkpoints.md has
mutants. So has each row of the table in docs/architecture.md that says what happens when a part dies. Further mutants
are changes that no test noticed in the past. It is an error if no test notices a mutant, or if the code to change does
not exist any more. All runs use a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import rewrite

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
LIMIT_S = 300.0
"""The time limit for the tests of one mutant, seconds. A mutant counts as noticed if its tests take longer."""
NOTICED, GREEN = 1, 0
"""Exit codes of pytest. Any other code means that nothing was tested."""


@dataclass(frozen=True)
class Mutant:
    """One change of the code, and the tests that should notice it."""

    breaks: str
    """The guarantee that the change breaks."""
    within: str
    """The qualified name of the function, class or variable that is changed."""
    find: str
    """The piece of code that is replaced."""
    put: str
    """The code that replaces the piece."""
    tests: tuple[str, ...]
    """Files or single tests, in the form for pytest."""

    def file(self, root: Path) -> Path:
        """Return the file that is changed.

        Raises:
            ValueError: there is no such module.
        """
        return rewrite.file_of(self.within, root)[0]

    def applied(self, root: Path) -> str:
        """Return the file's text with the change and without comments.

        Raises:
            ValueError: the piece to replace is missing, or occurs twice.
        """
        path, names = rewrite.file_of(self.within, root)
        return rewrite.rewritten(path.read_text(), names, self.find, self.put)


def load(path: Path = LIST) -> list[Mutant]:
    """Return all mutants of the list."""
    rows = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(within=row.pop("in"), tests=tuple(row.pop("tests")), **row) for row in rows]


def copied(folder: Path) -> Path:
    """Copy the files of the tree that git does not ignore, even if they are not committed. Returns the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def tested(root: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> tuple[int, list[str]]:
    """Run pytest in a copy of the tree. Returns its exit code and its last lines."""
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", *tests]
    process = subprocess.Popen(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return NOTICED, [f"FAILED by taking over {limit_s:.0f} s"]
    return process.returncode, printed.splitlines()[-40:]


def tried(root: Path, mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """Try mutants. Yields each with its problem (empty: a test noticed the mutant) and its time, seconds."""
    for mutant in mutants:
        began = time.monotonic()
        try:
            path, broken = mutant.file(root), mutant.applied(root)
        except ValueError as error:
            yield mutant, str(error), 0.0
            continue
        sound = path.read_text()
        try:
            path.write_text(broken)
            code, printed = tested(root, mutant.tests)
        finally:
            path.write_text(sound)
        wrong = {NOTICED: "", GREEN: f"lives: none of {', '.join(mutant.tests)} fails"}.get(
            code, f"nothing was tested (pytest: {code}): {printed[-1] if printed else ''}"
        )
        if code == NOTICED:
            line = next((line for line in printed if line.startswith(("FAILED", "ERROR"))), printed[-1])
            print(f"          {line[:160]}")
        yield mutant, wrong, time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants whose description has all given words. Returns 1 if there is a problem, otherwise 0."""
    parser = argparse.ArgumentParser(description="Break one piece of code at a time and see whether a test notices.")
    parser.add_argument("words", nargs="*", help="only those mutants whose description or function has all these words")
    parser.add_argument("--list", action="store_true", help="say what would be broken")
    given = parser.parse_args(arguments)
    chosen = [one for one in load() if all(word in f"{one.breaks} {one.within}" for word in given.words)]
    if not chosen:
        parser.error(f"no mutant has the words {' '.join(given.words)}")
    if given.list:
        print("\n".join(f"{one.within}: {one.breaks}" for one in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="everstep-mutants-") as folder:
        root = copied(Path(folder))
        tests = sorted({test for one in chosen for test in one.tests})
        print(f"without a mutant: {len(tests)} files and tests …", flush=True)
        code, printed = tested(root, tests, len(tests) * LIMIT_S)
        if code != GREEN:
            print("\n".join(["the tests fail without a mutant, so that they say nothing:", *printed]), file=sys.stderr)
            return 1
        wrong = []
        for number, (mutant, problem, seconds) in enumerate(tried(root, chosen), 1):
            word = "LIVES" if problem else "killed"
            print(
                f"{number:3d}/{len(chosen)}  {word:6s} {seconds:5.0f} s  {mutant.within}: {mutant.breaks}", flush=True
            )
            wrong += [f"{mutant.within}: {mutant.breaks}: {problem}"] if problem else []
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} mutants were noticed", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
