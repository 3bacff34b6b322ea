"""Checks of a job file: its script, its variables, its checkpoints and its policy."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from everstep.base.redaction import is_secret
from everstep.decisions.act.evict.rules import OPERATOR, RULES
from everstep.decisions.act.ladder.next_rung import DEFAULT_MODES
from everstep.model.diagnosis import Diagnostic
from everstep.model.eviction import EvictMode
from everstep.model.job import JobSpec
from everstep.model.ladder import RungMode


def script_problems(script: Path) -> list[str]:
    """Why a path is not a readable script; empty: it is."""
    if script.is_dir():
        return [f"{script} is a folder: name the Python script in it"]
    if not script.exists():
        siblings = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
        near = difflib.get_close_matches(script.name, siblings, n=1)
        return [f"there is no file {script}" + (f"; did you mean {near[0]}?" if near else ": check the path")]
    if not os.access(script, os.R_OK):
        return [f"{script} cannot be read: check its permissions"]
    return []


def syntax_problem(script: Path) -> str | None:
    """Why a script is not Python; None: this interpreter can compile it."""
    return _syntax_problem(script, script.read_bytes())


@lru_cache(maxsize=8)
def _syntax_problem(script: Path, source: bytes) -> str | None:
    """The result of :func:`syntax_problem`, kept for each content: a soak has hundreds of jobs with one script."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.lineno is None:
            return f"{script} is not Python: {error.msg}"
        line = (error.text or "").rstrip()
        pointer = f"\n      {line}\n      {' ' * max(0, (error.offset or 1) - 1)}^" if line else ""
        return f"{script}, line {error.lineno}, is not Python: {error.msg}{pointer}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{script} is not Python: {error}"
    return None


def env_warnings(spec: JobSpec) -> list[str]:
    """Warnings about variables that look like secrets: every user of Temporal can read them."""
    exposed = [name for name, value in spec.env.items() if is_secret(name, value, spec.redact)]
    if not exposed:
        return []
    return [
        f"{', '.join(exposed)} in env {'is' if len(exposed) == 1 else 'are'} stored unencrypted in Temporal's history, "
        "where every user of Temporal can read it. Take secrets from the machines with env_from "
        "(docs/guides/security.md)"
    ]


def checkpoint_problems(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Contradictions in the table ``[checkpoint]``: pairs of the key to change and the problem.

    The model itself refuses invalid values, and the machines check whether storage can be reached.
    """
    if table.get("disk") is False:
        if table.get("remote_url"):
            yield "remote_url", "copies for remote storage are made from disk: set disk = true"
    elif table.get("disk_every_min") == 0 and not table.get("disk_every_steps"):
        yield "disk_every_min", "no checkpoint would ever be written to disk: set disk_every_steps, or disk = false"
    url = table.get("remote_url")
    if isinstance(url, str) and "://" in url:
        from fsspec.registry import available_protocols

        protocols = {part for part in url.split("://")[0].split("::") if part}
        for unknown in sorted(protocols - {*available_protocols()}):
            near = difflib.get_close_matches(unknown, available_protocols(), n=1)
            hint = f"did you mean {near[0]}://?" if near else "use a URL such as s3://bucket/runs or file:///mnt/runs"
            yield "remote_url", f"there is no protocol {unknown}: {hint}"


def policy_problems(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Unknown rules, rungs, tests and modes in the table ``[policy]``: pairs of the key and the problem.

    The model accepts any word there, since a later release may know more words.

    Args:
        table: Values by names such as ``evict.mode``.
    """
    modes = ", ".join(EvictMode)
    mode = table.get("evict.mode")
    if isinstance(mode, str) and not EvictMode(mode).known:
        yield "evict.mode", f"expected one of {modes}"
    names = [rule.name for rule in RULES if rule.evicts and rule.name != OPERATOR]  # an operator's eviction has no mode
    rules = table.get("evict.rules")
    for name, own in rules.items() if isinstance(rules, dict) else ():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            yield "evict.rules", f"{name} is not a rule that evicts: {hint}"
        elif isinstance(own, str) and not EvictMode(own).known:
            yield "evict.rules", f"{name}: expected one of {modes}"
    yield from _ladder_problems(table)


def _ladder_problems(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Unknown names in the settings of the ladder and of the diagnostic tests."""
    rungs, tests = [str(rung) for rung in DEFAULT_MODES], [str(test) for test in Diagnostic]
    ladder, settings, off = (table.get(name) for name in ("ladder.modes", "diagnose.settings", "diagnose.off"))
    for name, mode in ladder.items() if isinstance(ladder, dict) else ():
        if name not in rungs:
            yield "ladder.modes", f"{name} is not a rung whose mode can be set: there are {', '.join(rungs)}"
        elif isinstance(mode, str) and not RungMode(mode).known:
            yield "ladder.modes", f"{name}: expected one of {', '.join(RungMode)}"
    named = [("diagnose.settings", name) for name in (settings if isinstance(settings, dict) else ())]
    named += [("diagnose.off", name) for name in (off if isinstance(off, list) else ())]
    for key, name in named:
        if name not in tests:
            near = difflib.get_close_matches(str(name), tests, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(tests)}"
            yield key, f"{name} is not a test: {hint}"
