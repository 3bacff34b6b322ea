"""Reads recorded failures of machines from a file of JSON lines: first the cluster, then one line for each failure.

    {"machines": 400, "from": 0, "until": 30151854}
    {"machine": "n000", "failed": 336571, "repaired": 4666058}

Times are in seconds. Any clock may be used, but all lines must use the same clock. ``repaired`` is null or missing if
the machine is not back.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everstep.decisions.pool.demand import FailureRecord, MachineFailure
from everstep.errors import ConfigError

DAY_S = 86_400.0
SHAPE = (
    'the first line is {"machines": 400, "from": 0, "until": 30151854}, '
    'every other line is {"machine": "n000", "failed": 336571, "repaired": 4666058}, with times in seconds'
)

Line = TypeVar("Line", bound=BaseModel)


class RecordedCluster(BaseModel):
    """The first line of the file: the cluster."""

    model_config = ConfigDict(extra="forbid")

    machines: int = Field(ge=1)
    begin: float = Field(alias="from", allow_inf_nan=False)
    until: float = Field(allow_inf_nan=False)


class RecordedFailure(BaseModel):
    """Each further line of the file: one failure."""

    model_config = ConfigDict(extra="forbid")

    machine: str = Field(min_length=1)
    failed: float = Field(allow_inf_nan=False)
    repaired: float | None = Field(default=None, allow_inf_nan=False)


def read_failures(path: Path) -> FailureRecord:
    """Read the record of failures in a file.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names the line and the correct form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"there is no file of failures {path}: check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: name the file of failures in it") from None
    except OSError as error:
        raise ConfigError(f"the failures {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the failures {path} are not UTF-8 text (byte {error.start}): {SHAPE}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"the file of failures {path} is empty: {SHAPE}")
    cluster = _parsed(RecordedCluster, path, *numbered[0])
    if cluster.until <= cluster.begin:
        raise ConfigError(f"{path}:{numbered[0][0]}: 'until' {cluster.until:g} is not after 'from' {cluster.begin:g}")
    failures = []
    for number, line in numbered[1:]:
        failure = _parsed(RecordedFailure, path, number, line)
        if not cluster.begin <= failure.failed <= cluster.until:
            raise ConfigError(
                f"{path}:{number}: 'failed' {failure.failed:g} is not between 'from' {cluster.begin:g} and 'until' "
                f"{cluster.until:g} of the first line"
            )
        if failure.repaired is not None and failure.repaired < failure.failed:
            raise ConfigError(f"{path}:{number}: 'repaired' {failure.repaired:g} is before 'failed' {failure.failed:g}")
        back_day = None if failure.repaired is None else (failure.repaired - cluster.begin) / DAY_S
        failures.append(MachineFailure(failure.machine, (failure.failed - cluster.begin) / DAY_S, back_day))
    return FailureRecord(cluster.machines, (cluster.until - cluster.begin) / DAY_S, tuple(failures))


def _parsed(model: type[Line], path: Path, number: int, line: str) -> Line:
    try:
        return model.model_validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}:{number}: {where + ': ' if where else ''}{first['msg']}; {SHAPE}") from error
