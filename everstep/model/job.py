"""Defines the specification of a job, as a user writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from everstep.base.addresses import Ports
from everstep.base.redaction import PATTERNS, redacted
from everstep.errors import TopologyError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.machine import Assignment, Machine
from everstep.model.message import Model
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.topology import SHORT_ORDER, Laid, Topology, parse_laid, parse_mesh

M = TypeVar("M")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IN_PLACE = "in-place"
"""The value of ``code`` for a job whose script runs in its own folder, without a snapshot."""
JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?")
REPLAY = "~"
"""Separator between the name of a job and the name of a machine group that replays the job."""
REPLAY_NAME = re.compile(rf"{JOB_NAME.pattern}{REPLAY}[a-z0-9-]{{1,20}}")


def replay_name(job: str, group: str) -> str:
    """The name under which a group of machines replays a job, e.g. ``gpt~row-3``."""
    return f"{job}{REPLAY}{group.replace(' ', '-')}"


def owner_of(name: str) -> str:
    """The job's name in the name of a replay; any other name is returned unchanged."""
    return name.partition(REPLAY)[0]


class JobSpec(BaseModel):
    """A training job: a script, its size and its recovery policy.

    It is read from a TOML file or from the options of ``everstep run``. Histories store it, so fields are only added,
    with defaults; fields of a newer release are kept and passed on.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(description="Unique name: up to 30 of a-z, 0-9 and '-'.")
    script: str = Field(
        description="The Python script: its absolute path on every machine, or its path in the snapshot (code)."
    )
    code: str = Field(
        "",
        description="Before the start: the folder of the first version (empty: the script's folder), or 'in-place'. "
        "After the start: the digest of the snapshot; empty: the script runs in place.",
    )
    version: int = Field(0, ge=0, description="Number of the version that these settings describe; 0: not known.")
    args: list[str] = Field(default_factory=list, description="Arguments of the script.")
    cwd: str = Field("", description="Working directory; empty: the script's folder.")
    cwd_by_default: bool = Field(
        False,
        description="cwd is a default: on a machine without that folder, ranks use the script's folder in the "
        "snapshot.",
    )
    python: str = Field("", description="Interpreter of the job; empty: the agent's own.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment of every rank.")
    env_from: list[str] = Field(
        default_factory=list,
        description="Variables whose values each machine reads from env_file or from its agent's environment.",
    )
    env_file: str = Field("", description="File on every machine with lines NAME=value, for env_from.")
    redact: list[str] = Field(
        default_factory=lambda: list(PATTERNS),
        description="Patterns of names in env whose values are not shown.",
    )
    store_ports: str = Field(
        "",
        description="Port or range of ports of the rendezvous store, e.g. '29500-29510': it takes the first free one; "
        "empty: any free port.",
    )
    machines: int = Field(1, ge=1, description="Number of machines.")
    ranks_per_machine: int = Field(1, ge=1, description="Ranks on each machine.")
    tp: int = Field(1, ge=1, description="Tensor-parallel size.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size; the data-parallel size follows.")
    order: tuple[str, ...] = Field(SHORT_ORDER, description="Mesh order, the last axis varies fastest.")
    mesh: tuple[tuple[str, int], ...] = Field(
        (),
        description="Replaces tp, pp and order: axes with their sizes, in mesh order; one size may be -1, which means "
        "all remaining ranks.",
    )
    groups: tuple[Laid, ...] = Field(
        (), description="Kinds of parallel groups that are not an axis: name, size, and the axes along which they lie."
    )
    checkpoint: CheckpointPolicy = Field(
        default_factory=CheckpointPolicy, description="Where copies of the training state go."
    )
    policy: RecoveryPolicy = Field(default_factory=RecoveryPolicy, description="Recovery policy.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not (JOB_NAME.fullmatch(value) or REPLAY_NAME.fullmatch(value)):
            raise ValueError(f"{value!r} is not a job name: use up to 30 of a-z, 0-9 and '-', e.g. 'gpt-small'")
        return value

    @field_validator("env_from")
    @classmethod
    def _env_from(cls, value: list[str], info: ValidationInfo) -> list[str]:
        for name in value:
            if not VARIABLE.fullmatch(name) or name.startswith("EVERSTEP_"):
                raise ValueError(f"{name!r} is not a variable that a job can have: name it as in HF_TOKEN")
            if name in info.data.get("env", {}):
                raise ValueError(f"{name} is also in env, where others can read its value: remove it from env")
        return value

    @field_validator("store_ports")
    @classmethod
    def _store_ports(cls, value: str) -> str:
        Ports.parse(value or "0")
        return value

    @field_validator("mesh", mode="before")
    @classmethod
    def _mesh(cls, value: Any) -> Any:
        """Read a mesh from the text of the command line, or from a table."""
        try:
            axes = parse_mesh(value) if isinstance(value, str) else value
        except TopologyError as error:
            raise ValueError(str(error)) from error
        if isinstance(axes, dict):
            if wrong := [axis for axis, size in axes.items() if type(size) is not int]:
                raise ValueError(f"the size of {wrong[0]} is {axes[wrong[0]]!r}; it must be a whole number")
            return tuple(axes.items())
        if not isinstance(axes, list | tuple) or any(not isinstance(axis, list | tuple) for axis in axes):
            raise ValueError("expected axes with sizes, e.g. {pp = 2, dp = -1}")
        return tuple(map(tuple, axes))

    @field_validator("groups", mode="before")
    @classmethod
    def _groups(cls, value: Any) -> Any:
        """Read groups from the texts of the command line, or from a table of tables."""
        if isinstance(value, dict):
            value = [_laid_text(name, kind) for name, kind in value.items()]
        texts = value.split() if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise ValueError('expected groups, e.g. {ep = {size = 4, over = ["dp_shard", "tp"]}}')
        try:
            return tuple(parse_laid(kind) if isinstance(kind, str) else _laid(kind) for kind in texts)
        except TopologyError as error:
            raise ValueError(str(error)) from error

    def without_secrets(self) -> JobSpec:
        """A copy that may be shown and kept: without the values of variables that look like secrets."""
        return self.model_copy(update={"env": redacted(self.env, self.redact)})

    @model_validator(mode="after")
    def _sizes(self) -> JobSpec:
        try:
            topology = self.topology()
        except TopologyError as error:
            raise ValueError(str(error)) from error
        self.__dict__.update(tp=1, pp=1, order=SHORT_ORDER, mesh=topology.mesh, groups=topology.laid)
        if topology.is_short:
            self.__dict__.update(tp=topology.tp, pp=topology.pp, order=topology.axes, mesh=())
        return self

    def topology(self) -> Topology:
        """Sizes and groups."""
        if not self.mesh:
            order: Any = self.order
            short = Topology.of(self.machines, self.ranks_per_machine, self.tp, self.pp, order)
            return replace(short, laid=self.groups) if self.groups else short
        topology = Topology(self.machines, self.ranks_per_machine, self.mesh, self.groups)
        if (self.tp, self.pp, self.order) != (1, 1, SHORT_ORDER):
            raise TopologyError("mesh replaces tp, pp and order: give either mesh or those")
        return topology

    def assignment(self, machines: Sequence[M]) -> Assignment[M]:
        """The map between the job's machines and ranks.

        Args:
            machines: All machines of the job, or their names, in the job's order.
        """
        return Assignment(self.topology(), machines)


def _laid_text(name: str, kind: Any) -> str:
    """A laid group from a table, as text of the command line."""
    if not isinstance(kind, dict) or set(kind) != {"size", "over"} or not isinstance(kind["over"], list):
        raise ValueError(f'{name} is not a group: write it as {name} = {{ size = 4, over = ["dp_shard", "tp"] }}')
    return f"{name}={kind['size']}:{'+'.join(map(str, kind['over']))}"


def _laid(kind: Any) -> Laid:
    """A laid group from JSON: name, size, axes."""
    if not isinstance(kind, list | tuple) or len(kind) != 3:
        raise ValueError(f"{kind!r} is not a group: write it as ep=4:dp_shard+cp")
    name, size, over = kind
    return Laid(name, size, tuple(over))


class PlacedJob(Model):
    """A job with the machines on which it runs."""

    spec: JobSpec
    machines: list[Machine]
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
