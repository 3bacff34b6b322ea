"""Breaks one piece of code at a time and looks whether a test notices: ``make mutants [ONLY=words]``.

``mutants.toml`` lists what to break: each guarantee of docs/concepts/checkpoints.md, each row of
the table of dead parts in docs/architecture.md, and what lived once. A mutant that lives
is an error, as is one whose piece is not in the code any more. Works on a copy of the tree.
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
"""For the tests of one mutant; one that makes them hang, or their end, is noticed too."""
NOTICED, GREEN = 1, 0
"""Exit codes of pytest; any other one says that nothing was tested."""


@dataclass(frozen=True)
class Mutant:
    """One change, and the tests that should see it."""

    breaks: str
    """What does not hold with it."""
    within: str
    """The qualified name of the function, class or variable that is changed."""
    find: str
    """The piece of it that is replaced."""
    put: str
    """What replaces it."""
    tests: tuple[str, ...]
    """Files or single tests, as pytest takes them."""

    def file(self, root: Path) -> Path:
        """The file that is changed.

        Raises:
            ValueError: there is no such module.
        """
        return rewrite.file_of(self.within, root)[0]

    def applied(self, root: Path) -> str:
        """The file's text with the change, without its comments.

        Raises:
            ValueError: the piece to replace is not there, or there twice.
        """
        path, names = rewrite.file_of(self.within, root)
        return rewrite.rewritten(path.read_text(), names, self.find, self.put)


def load(path: Path = LIST) -> list[Mutant]:
    """All mutants of the list."""
    rows = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(within=row.pop("in"), tests=tuple(row.pop("tests")), **row) for row in rows]


def copied(folder: Path) -> Path:
    """A copy of what git knows of the tree, with what is not committed yet."""
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
    """Exit code of pytest in a copy, and the last lines that it printed."""
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
    """Each mutant with what is wrong about it (empty: a test noticed it) and the seconds that it took."""
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
    """Try the mutants whose description has all words given; 1 if one lives."""
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
