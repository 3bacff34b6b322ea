"""What a user asks for: a job."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from everstep.checkpoint_policy import CheckpointPolicy
from everstep.errors import TopologyError
from everstep.policy import RecoveryPolicy
from everstep.topology import Axis, Topology

JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?")


class JobSpec(BaseModel):
    """A training job: a script, its size and its recovery policy.

    Read from a TOML file or from the options of ``everstep run``. Stored in
    workflow histories, so fields are only added, with defaults; what a newer
    release added is kept and passed on.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(description="Unique name: up to 30 of a-z, 0-9 and '-'.")
    script: str = Field(description="Absolute path of the Python script on every machine.")
    args: list[str] = Field(default_factory=list, description="Arguments of the script.")
    cwd: str = Field("", description="Working directory; empty: the script's folder.")
    python: str = Field("", description="Interpreter of the job; empty: the agent's own.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment of every rank.")
    machines: int = Field(1, ge=1, description="Number of machines.")
    ranks_per_machine: int = Field(1, ge=1, description="Ranks on each machine.")
    tp: int = Field(1, ge=1, description="Tensor-parallel size.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size; the data-parallel size follows.")
    order: tuple[Axis, ...] = Field(("pp", "dp", "tp"), description="Mesh order, the last axis varies fastest.")
    checkpoint: CheckpointPolicy = Field(
        default_factory=CheckpointPolicy, description="Where copies of the training state go."
    )
    policy: RecoveryPolicy = Field(default_factory=RecoveryPolicy, description="Recovery policy.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not JOB_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not a job name: use up to 30 of a-z, 0-9 and '-', e.g. 'gpt-small'")
        return value

    @model_validator(mode="after")
    def _sizes(self) -> JobSpec:
        try:
            self.topology()
        except TopologyError as error:
            raise ValueError(str(error)) from error
        return self

    def topology(self) -> Topology:
        """Sizes and the map from ranks to machines."""
        return Topology(
            machines=self.machines, ranks_per_machine=self.ranks_per_machine, tp=self.tp, pp=self.pp, order=self.order
        )
