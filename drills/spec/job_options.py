"""The options that every drill has: the size of the job, its script, and the step of the fault."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

NOT_ON_THE_COMMAND_LINE: JsonDict = {"hidden": True}
"""Marks a field without an option of ``everstep drill``."""


class JobOptions(BaseModel):
    """The options that every drill has. None means the value that suits the fault."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_step: int = Field(20, ge=0, description="Step at which the fault strikes.")
    machines: int | None = Field(None, ge=1, description="Machines of the job. Default: 4.")
    ranks_per_machine: int | None = Field(None, ge=1, description="Ranks on each machine. Default: 2.")
    tp: int | None = Field(None, ge=1, description="Tensor-parallel size. Default: 2.")
    pp: int | None = Field(None, ge=1, description="Pipeline-parallel size. Default: 2.")
    mesh: str = Field("", description="All axes of the mesh, in place of tp and pp, e.g. dp_replicate=2,dp_shard=2.")
    groups: list[str] = Field(
        default_factory=list,
        description="A kind of parallel group that is not an axis. ep=4:dp_shard+tp makes ep groups of four ranks "
        "each.",
        json_schema_extra={"option": "--group"},
    )
    standbys: int = Field(1, ge=0, description="Machines in addition to those of the job.")
    steps: int | None = Field(None, ge=1, description="Steps of the job, passed to the script as --steps.")
    step_seconds: float | None = Field(
        None, ge=0, description="Shortest step of the example, seconds. Default: what the fault needs."
    )
    config: Path | None = Field(None, description="A job file; options win over its values.")
    script: list[str] = Field(
        default_factory=list,
        description="Script and arguments; default: the example GPT. {run} in an argument is replaced by a new folder.",
        json_schema_extra=NOT_ON_THE_COMMAND_LINE,
    )
    policy: dict[str, float] = Field(default_factory=dict, json_schema_extra=NOT_ON_THE_COMMAND_LINE)
    spare: int = Field(
        0,
        ge=0,
        description="Spare machines of the cluster; known once it is up.",
        json_schema_extra=NOT_ON_THE_COMMAND_LINE,
    )
    replaces: bool = Field(
        False,
        description="Whether a spare machine takes the place of the machine at fault.",
        json_schema_extra=NOT_ON_THE_COMMAND_LINE,
    )
