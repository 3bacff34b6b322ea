"""Reads a job file into a checked ``JobSpec``; all problems are reported together.

Values on the command line replace those of the environment (``EVERSTEP_JOB_TP``, ``EVERSTEP_JOB_POLICY_HANG_FLOOR_S``,
``EVERSTEP_JOB_CHECKPOINT_SLOTS``), and these replace the values in the file::

    script = "train.py"          # relative to this file
    args = ["--steps", "300"]
    machines = 4
    ranks_per_machine = 2
    tp = 2
    pp = 2

    [checkpoint]
    disk_every_min = 10

    [policy.retry]
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
from controlplane.settings_files import read_toml
from everstep.base.redaction import HIDDEN, is_secret
from everstep.errors import ConfigError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import IN_PLACE, JobSpec
from everstep.model.recovery_policy import GROUPS, RecoveryPolicy

PREFIX = "EVERSTEP_JOB_"
TABLES: dict[str, type[BaseModel]] = {
    "checkpoint": CheckpointPolicy,
    **{f"policy.{group}": model for group, model in GROUPS.items()},
    "policy": RecoveryPolicy,
}
"""The tables of a job file."""
FORMER = {
    "stall_floor_s": "policy.hang.floor_s",
    "stall_factor": "policy.hang.factor",
    "stall_ceiling_s": "policy.hang.ceiling_s",
    "hang_floor_s": "policy.hang.idle_floor_s",
    "hang_factor": "policy.hang.idle_factor",
    "slow_s": "policy.slow.after_s",
    "slow_again_s": "policy.slow.again_after_s",
    "silent_s": "policy.silence.detect_s",
    "silent_evict_s": "policy.silence.evict_s",
    "agent_retry_max_s": "policy.silence.retry_max_s",
    "hold_s": "policy.stop.align_s",
    "parked_timeout_h": "policy.park.timeout_h",
    "rollback_s": "policy.rollback.within_s",
    "rollback_error_h": "policy.rollback.error_within_h",
    "diagnose_s": "policy.diagnose.timeout_s",
    "replay_s": "policy.replay.timeout_s",
    "replay_shows": "policy.replay.fault_share",
    "replay_miss": "policy.replay.miss_probability",
}
"""Former name of a setting → its present name."""
_TEXT = {"name", "script", "code", "cwd", "python", "env_file", "disk_path", "remote_url", "store_ports"}
_PATHS = ("script", "code", "cwd", "python", "env_file", "disk_path", "remote_url")
OPTIONS = {"ranks_per_machine": "ranks-per-machine", "groups": "group"}
"""Field → its option on the command line, if the names differ."""
_SHAPE = ("machines", "ranks_per_machine", "tp", "pp", "order", "mesh", "groups")


def load_job(
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    recorded: bool = False,
) -> JobSpec:
    """Read and check a job file.

    Args:
        path: The job file; None: ``overrides`` has all values.
        overrides: Values from the command line by field name; a value of None is not set; tables are mappings.
        environment: Variables with ``EVERSTEP_JOB_*``; None: those of this process.
        recorded: Whether the job runs recorded code. If so, its present script is not checked, and may be missing.

    Raises:
        ConfigError: the message has one line for each problem, with key, value, source and remedy.
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
        inner = key.removeprefix(f"{table.replace('.', '_')}_")
        if inner != key:
            entry: Any = {inner: text if inner in _TEXT else _number(text)}
            for name in reversed(table.split(".")):
                entry = {name: entry}
            return dict(entry)
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
        """Add the values of a source, which replace earlier values; relative paths are relative to ``folder``."""
        for key, value in entries.items():
            if key not in JobSpec.model_fields or key in {"version", "cwd_by_default"}:  # set by everstep alone
                self._unknown(key, source, "")
            elif key in TABLES and isinstance(value, Mapping):
                self._add_table(key, self.values.setdefault(key, {}), value, source, folder)
            else:
                self.values[key] = _resolved(key, value, folder)
                self.sources[key] = source

    def _add_table(self, table: str, values: Any, entries: Mapping[str, Any], source: str, folder: Path) -> None:
        if not isinstance(values, dict):
            return  # an earlier source has a value that is not a table; this is reported later
        for key, value in entries.items():
            name = f"{table}.{key}"
            if value is None:
                continue
            if key not in TABLES[table].model_fields:
                self._unknown(key, source, table)
            elif name in TABLES and isinstance(value, Mapping):
                self._add_table(name, values.setdefault(key, {}), value, source, folder)
            else:
                values[key] = _resolved(key, value, folder)
                self.sources[name] = source

    def _unknown(self, key: str, source: str, table: str) -> None:
        self.problems.append(f"unknown key '{_join(table, key)}' {source}: {_remedy(key, table)}")

    def checked(self) -> JobSpec:
        """The checked job.

        Raises:
            ConfigError: there are problems; the message lists all of them.
        """
        script = self.values.get("script")
        if script in (None, ""):
            self.problems.append('script is missing: name the Python script to run, e.g. script = "train.py"')
        elif isinstance(script, str) and not self.recorded:
            self._check_paths()
        self._check_table("checkpoint", checks.checkpoint_problems)
        self._check_table("policy", checks.policy_problems)
        self.values.setdefault("script", "")
        self.values.setdefault("name", _default_name(self.path, str(script or "job")))
        spec = self._validated()
        if self.problems or spec is None:
            name = f"the job file {self.path}" if self.path else "the job"
            count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "a problem"
            raise ConfigError("\n  - ".join([f"{name} has {count}:", *self.problems]))
        return spec

    def _validated(self) -> JobSpec | None:
        try:
            # Strict JSON refuses "4" in place of 4, but still converts lists to tuples, and tables to models.
            return JobSpec.model_validate_json(json.dumps(self.values, default=str), strict=True)
        except ValidationError as error:
            details = error.errors()
        self.problems += [self._problem_text(detail) for detail in details]
        # The model compares the sizes last, and only if all other values are valid. If not, they are compared here.
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
            except (IndexError, ValueError, TypeError):  # a validator added parts to the location
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
            flat = {key: value for key, value in table.items() if not isinstance(value, dict)}
            for group, inner in table.items():
                if f"{name}.{group}" in TABLES and isinstance(inner, dict):
                    flat |= {f"{group}.{key}": value for key, value in inner.items()}
            for key, problem in check(flat):
                self.problems.append(f"{name}.{key} = {flat[key]!r} {self.sources[f'{name}.{key}']}: {problem}")


def _join(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _remedy(key: str, table: str) -> str:
    """The remedy for a key that a table does not have."""
    key = key.lower().replace("-", "_")
    if former := FORMER.get(key):
        return f"it is now called '{former}'"
    if others := _other_tables(key, table):
        return f"move it {' or '.join(others)}"
    tables = [table, *(name for name in TABLES if name.startswith(f"{table}."))]
    full_names = {name: _join(inner, name) for inner in reversed(tables) for name in _fields(inner)}
    if near := difflib.get_close_matches(key, full_names, n=1, cutoff=0.6):
        return f"did you mean '{full_names[near[0]]}'?"
    return f"there are {', '.join(_fields(table))}"


def _fields(table: str) -> Iterable[str]:
    return (TABLES[table] if table else JobSpec).model_fields


def _other_tables(key: str, table: str) -> list[str]:
    """The tables that have a key, as texts such as ``under [checkpoint]``; empty: no table has it."""
    if table and key in JobSpec.model_fields:
        return [f"to the top of the file, above [{table}]"]
    texts = []
    for other, model in TABLES.items():
        inner = key.removeprefix(f"{other.rpartition('.')[2]}_")
        if other != table and inner in model.model_fields:
            texts.append(f"under [{other}]" + (f" as '{inner}'" if inner != key else ""))
    return texts


def _resolved(key: str, value: Any, folder: Path) -> Any:
    if key == "order" and isinstance(value, str):
        return value.split("-")
    if isinstance(value, Path):
        value = str(value)
    if key not in _PATHS or not isinstance(value, str) or not value:
        return list(value) if isinstance(value, tuple) else value
    if (key == "python" and "/" not in value) or (key == "remote_url" and "://" in value):
        return value  # for python, the machine searches its PATH for this name
    if key == "code" and value == IN_PLACE:
        return value
    return os.path.normpath(folder / Path(value).expanduser())


def _default_name(path: Path | None, script: str) -> str:
    """The job file's name without its ending. Without a job file, it is the script's name with a random suffix, so that
    each run is a new job."""
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
