"""Makes the new code for a drill's update: a copy of the job's code with some lines inserted into the script.

The lines work in any script that reports its steps to everstep. They are inserted after the docstring and the
imports from ``__future__``.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Sequence
from pathlib import Path

from activities.versions.listing import files_of
from everstep.errors import CannotInject
from everstep.model.job import IN_PLACE, JobSpec

AT_START = "import a_module_that_nobody_has"
"""Lines that fail at the import of the script."""
AFTER_STEPS = """
import everstep as _everstep

_begun, _report = [], _everstep.Run.report


def _fails(self, step, *args, **kwargs):
    _begun.append(step)
    if step >= _begun[0] + {steps}:
        raise RuntimeError("this version fails after {steps} steps")
    return _report(self, step, *args, **kwargs)


_everstep.Run.report = _fails
"""
"""Lines that fail after ``{steps}`` steps of each process."""
CHANGES_STATE = """
import torch as _torch

import everstep as _everstep

_checkpoint = _everstep.Run.checkpoint


def _wider(self, *args, **kwargs):
    model = next(value for value in kwargs.values() if isinstance(value, _torch.nn.Module))
    model.register_parameter("a_new_one", _torch.nn.Parameter(_torch.zeros(8)))
    return _checkpoint(self, *args, **kwargs)


_everstep.Run.checkpoint = _wider
"""
"""Lines that add a parameter, so that the saved state does not fit."""


def write(spec: JobSpec, folder: Path, lines: str, note: str) -> None:
    """Write a copy of a job's code, with lines inserted into the script.

    Args:
        spec: The job as it was started.
        folder: The new folder, which must not exist.
        lines: Lines of Python.
        note: A comment, so that two updates with the same lines differ.

    Raises:
        CannotInject: the script is no valid Python.
    """
    script = Path(spec.script)
    source = script.parent if spec.code in {"", IN_PLACE} else Path(spec.code)
    for name in files_of(source):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target, follow_symlinks=False)
    before = script.read_text().splitlines()
    try:
        at = _after_the_head(ast.parse("\n".join(before)).body)
    except SyntaxError as error:
        raise CannotInject(f"{script} is no valid Python, so no lines can be inserted: {error}") from error
    changed = [*before[:at], f"# {note}", *lines.splitlines(), *before[at:]]
    (folder / script.relative_to(source)).write_text("\n".join(changed) + "\n")


def _after_the_head(body: Sequence[ast.stmt]) -> int:
    """Return the number of the last line of a module's docstring and its imports from ``__future__``; 0: it has
    neither."""
    at = 0
    for position, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not ((position == 0 and is_text) or is_future):
            break
        at = statement.end_lineno or at
    return at
