"""Job files: TOML in, a checked JobSpec out; all problems are reported together.

A value comes from the command line, else from the environment
(``EVERSTEP_JOB_TP``, ``EVERSTEP_JOB_POLICY_MAX_ATTEMPTS``, ``EVERSTEP_JOB_CHECKPOINT_SLOTS``), else from the file::

    script = "train.py"          # relative to this file
    args = ["--steps", "300"]
    machines = 4
    ranks_per_machine = 2
    tp = 2
    pp = 2

    [checkpoint]
    disk_every_min = 10

    [policy]
    max_attempts = 5
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from controlplane.job_file import checks
from controlplane.toml_file import read_toml
from everstep.base.redaction import HIDDEN, is_secret
from everstep.errors import ConfigError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import IN_PLACE, JobSpec
from everstep.model.recovery_policy import RecoveryPolicy

PREFIX = "EVERSTEP_JOB_"
TABLES: dict[str, type[BaseModel]] = {"checkpoint": CheckpointPolicy, "policy": RecoveryPolicy}
"""The tables of a job file."""
_TEXT = {"name", "script", "code", "cwd", "python", "env_file", "disk_path", "remote_url"}
_PATHS = ("script", "code", "cwd", "python", "env_file", "disk_path", "remote_url")
OPTIONS = {"ranks_per_machine": "ranks-per-machine", "groups": "group"}
"""Options of the command line that are not called like their field."""
_SHAPE = ("machines", "ranks_per_machine", "tp", "pp", "order", "mesh", "groups")


def load_job(
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    recorded: bool = False,
) -> JobSpec:
    """Read and check a job.

    Args:
        path: the job file, or None when everything is given by ``overrides``.
        overrides: values from the command line by field name; None means not given; tables are mappings.
        environment: where to look for ``EVERSTEP_JOB_*``; by default the process's own.
        recorded: it runs code that was recorded: what its script is now, or whether it is there, does not matter.

    Raises:
        ConfigError: with one line for each problem, naming key, value, source and remedy.
    """
    draft = _Draft(path, recorded)
    if path is not None:
        draft.add(read_toml(path, "job file"), f"in {path.name}", path.resolve().parent)
    here = Path.cwd()
    for name, text in sorted((os.environ if environment is None else environment).items()):
        if name.startswith(PREFIX):
            draft.add(_from_environment(name.removeprefix(PREFIX).lower(), text), f"from {name}", here)
    for name, value in (overrides or {}).items():
        if value is not None:
            draft.add(
                {name: value},
                "from " + ("the command line" if name in ("script", "args") else f"option --{OPTIONS.get(name, name)}"),
                here,
            )
    return draft.checked()


def _from_environment(key: str, text: str) -> dict[str, Any]:
    for table in TABLES:
        if key.startswith(f"{table}_"):
            inner = key.removeprefix(f"{table}_")
            return {table: {inner: text if inner in _TEXT else _number(text)}}
    if key == "args":
        return {key: shlex.split(text)}
    return {key: text if key in _TEXT | {"order", "mesh", "groups"} else _number(text)}


def _number(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@dataclass
class _Draft:
    """A job before it is checked, with the source of each value."""

    path: Path | None
    recorded: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, entries: Mapping[str, Any], source: str, folder: Path) -> None:
        """Take values from a source; later sources win. Relative paths are taken from ``folder``."""
        for key, value in entries.items():
            if key not in JobSpec.model_fields or key in {"version", "cwd_by_default"}:  # ours
                self._unknown(key, source, JobSpec, "")
            elif key in TABLES and isinstance(value, Mapping):
                self._add_table(key, value, source, folder)
            else:
                self.values[key] = _resolved(key, value, folder)
                self.sources[key] = source

    def _add_table(self, table: str, entries: Mapping[str, Any], source: str, folder: Path) -> None:
        values = self.values.setdefault(table, {})
        for key, value in entries.items():
            if value is None:
                continue
            if key not in TABLES[table].model_fields:
                self._unknown(key, source, TABLES[table], f"{table}.")
            elif isinstance(values, dict):
                values[key] = _resolved(key, value, folder)
                self.sources[f"{table}.{key}"] = source

    def _unknown(self, key: str, source: str, model: type[BaseModel], prefix: str) -> None:
        near = difflib.get_close_matches(key.lower().replace("-", "_"), model.model_fields, n=1, cutoff=0.6)
        if place := _other_place(key, model, prefix):
            hint = f"it belongs {place}"
        elif near:
            hint = f"did you mean '{prefix}{near[0]}'?"
        else:
            hint = f"known are {', '.join(model.model_fields)}"
        self.problems.append(f"unknown key '{prefix}{key}' {source}: {hint}")

    def checked(self) -> JobSpec:
        """The job.

        Raises:
            ConfigError: with all problems.
        """
        script = self.values.get("script")
        if script in (None, ""):
            self.problems.append('script is missing: say which Python script to run, e.g. script = "train.py"')
        elif isinstance(script, str) and not self.recorded:
            self._check_paths()
        self._check_table("checkpoint", checks.checkpoint_problems)
        self._check_table("policy", checks.policy_problems)
        self.values.setdefault("script", "")
        self.values.setdefault("name", _default_name(self.path, str(script or "job")))
        spec = self._validated()
        if self.problems or spec is None:
            what = f"the job file {self.path}" if self.path else "the job"
            count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "a problem"
            raise ConfigError("\n  - ".join([f"{what} has {count}:", *self.problems]))
        return spec

    def _validated(self) -> JobSpec | None:
        try:
            # As JSON: there, strict means no "4" for 4, yet lists make tuples and tables make models.
            return JobSpec.model_validate_json(json.dumps(self.values, default=str), strict=True)
        except ValidationError as error:
            details = error.errors()
        self.problems += [self._problem_text(detail) for detail in details]
        # Sizes are compared last, and not at all when a value beside them is wrong: compare them here.
        wrong = {str(detail["loc"][0]) if detail["loc"] else "sizes" for detail in details}
        if wrong.isdisjoint({"sizes", *_SHAPE}):
            shape = {name: self.values[name] for name in _SHAPE if name in self.values}
            try:
                JobSpec(name="job", script="job.py", **shape)
            except ValidationError as error:
                self.problems += [self._sizes(detail["ctx"]["error"]) for detail in error.errors()]
        return None

    def _problem_text(self, detail: Mapping[str, Any]) -> str:
        if not detail["loc"]:
            return self._sizes(detail["ctx"]["error"])
        value: Any = self.values
        key = ""
        for part in detail["loc"]:
            try:
                value = value.get(part) if isinstance(value, dict) else value[int(part)]
            except (IndexError, ValueError, TypeError):  # what a validator made of it has more parts
                break
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
        source = self.sources.get(key) or self.sources.get(str(detail["loc"][0]), "")
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        if key.startswith("env.") and is_secret(key[4:], str(value)):
            shown = HIDDEN
        elif key == "env" and not isinstance(value, int | float):
            shown = HIDDEN  # e.g. a list of NAME=value
        return f"{key} = {shown} {source}: {_expected(detail)}"

    def _sizes(self, error: Exception) -> str:
        sources = {self.sources[name].removeprefix("in ") for name in _SHAPE if name in self.sources}
        return f"{error} ({', '.join(sorted(sources))})" if sources else str(error)

    def _check_paths(self) -> None:
        script = Path(self.values["script"])
        self.problems += [f"script {self.sources['script']}: {problem}" for problem in checks.script_problems(script)]
        cwd, python = self.values.get("cwd"), self.values.get("python")
        if isinstance(cwd, str) and cwd and not Path(cwd).is_dir():
            self.problems.append(f"cwd {self.sources['cwd']}: there is no folder {cwd}")
        if isinstance(python, str) and "/" in python and not os.access(python, os.X_OK):
            self.problems.append(f"python {self.sources['python']}: {python} is not a program that can be started")
        if not python and not self.problems and (problem := checks.syntax_problem(script)):
            self.problems.append(problem)

    def _check_table(self, name: str, check: Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]) -> None:
        table = self.values.get(name)
        if isinstance(table, dict):
            for key, problem in check(table):
                self.problems.append(f"{name}.{key} = {table[key]!r} {self.sources[f'{name}.{key}']}: {problem}")


def _other_place(key: str, model: type[BaseModel], prefix: str) -> str:
    """Where a key that ``model`` does not know is at home; empty: nowhere."""
    for table, other in TABLES.items():
        inner = key.removeprefix(f"{table}_")
        if other is not model and inner in other.model_fields:
            return f"under [{table}]" + (f" as '{inner}'" if inner != key else "")
    return f"above [{prefix[:-1]}], at the top" if prefix and key in JobSpec.model_fields else ""


def _resolved(key: str, value: Any, folder: Path) -> Any:
    if key == "order" and isinstance(value, str):
        return value.split("-")
    if isinstance(value, Path):
        value = str(value)
    if key not in _PATHS or not isinstance(value, str) or not value:
        return list(value) if isinstance(value, tuple) else value
    if (key == "python" and "/" not in value) or (key == "remote_url" and "://" in value):
        return value  # a name is looked up on the machine
    if key == "code" and value == IN_PLACE:
        return value
    return os.path.normpath(folder / Path(value).expanduser())


def _default_name(path: Path | None, script: str) -> str:
    """From the job file's name; else from the script, with a suffix, so that each run is a job of its own."""
    stem = re.sub(r"[^a-z0-9]+", "-", (path or Path(script)).stem.lower()).strip("-") or "job"
    return stem[:30].strip("-") if path else f"{stem[:25].strip('-')}-{secrets.token_hex(2)}"


_EXPECTED = {
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text: put it in quotes",
    "list_type": 'expected a list, e.g. ["--steps", "300"]',
    "tuple_type": 'expected a list, e.g. ["pp", "dp", "tp"]',
    "dict_type": "expected a table",
    "model_type": "expected a table",
    "missing": "expected a value: the list is too short",
    "too_long": "expected fewer values",
    "literal_error": "expected {expected}",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected at most {le}",
    "finite_number": "expected a finite number",
    "value_error": "{error}",
}


def _expected(detail: Mapping[str, Any]) -> str:
    text = _EXPECTED.get(detail["type"])
    return text.format(**detail.get("ctx", {})) if text else detail["msg"]
