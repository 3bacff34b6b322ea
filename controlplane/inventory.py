"""The inventory: a TOML file that lists the machines of a deployed cluster, and the addresses of their agents.

    standbys = 1                      # this many machines at the end of the list are kept for replacement
    at_most = 12                      # if there are too few machines, the program in the next line adds more, up to 12
    provision = ["/opt/site/more-machines"]  # called with the new total number of machines, e.g. 10; edits this file

    [[machine]]
    name = "gpu-0417"                 # equals --machine of its agent
    address = "10.0.4.17:7070"        # equals --listen of its agent
    failure_domain = "rack-12"        # machines that fail together; backups are kept in another domain if possible

A local cluster needs no inventory, since its machines are in its own description.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from controlplane.settings_files import read_toml
from everstep.base.addresses import parse_address
from everstep.errors import ConfigError
from everstep.model.machine import Machine
from everstep.rank.environment import INVENTORY


class MachineEntry(BaseModel):
    """The entry of one machine in the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    address: str
    failure_domain: str = ""

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        address = parse_address(value)
        if not address.port:
            raise ValueError("the agent's port is missing: give host:port, e.g. 10.0.4.17:7070")
        return str(address)


class Inventory(BaseModel):
    """The contents of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    machine: list[MachineEntry] = Field(min_length=1)
    standbys: int = Field(0, ge=0)
    at_most: int = Field(0, ge=0)
    """Upper limit for the number of machines; 0: the list does not grow by itself."""
    provision: list[str] = Field(default_factory=list)
    """Program with its arguments that adds machines to the list."""

    @property
    def machines(self) -> list[Machine]:
        """All machines, the standbys last."""
        return [Machine(name=entry.name, address=entry.address, domain=entry.failure_domain) for entry in self.machine]

    @property
    def offered(self) -> list[Machine]:
        """The machines for jobs: all but the standbys."""
        return self.machines[: len(self.machine) - self.standbys]


def inventory_path(option: Path | None) -> Path | None:
    """The inventory that an option or the environment names; None: neither names an inventory."""
    path = os.environ.get(INVENTORY, "")
    return option or (Path(path) if path else None)


def load(path: Path) -> Inventory:
    """Read and check an inventory.

    Raises:
        ConfigError: the inventory has problems; the message has one line for each problem.
    """
    fields: dict[str, Any] = read_toml(path, "inventory")
    problems = []
    try:
        inventory = Inventory.model_validate(fields)
    except ValidationError as error:
        problems = [_problem_text(detail["loc"], detail["msg"], detail["input"]) for detail in error.errors()]
    else:
        values = [f"{key} {getattr(entry, key)}" for key in ("name", "address") for entry in inventory.machine]
        problems += [f"{value} is listed {times} times" for value, times in Counter(values).items() if times > 1]
        if inventory.standbys >= len(inventory.machine):
            problems.append(
                f"standbys = {inventory.standbys}: none of the {len(inventory.machine)} machines is left for jobs"
            )
        if bool(inventory.at_most) != bool(inventory.provision):
            problems.append("at_most and provision belong together: set both, or neither")
    if problems:
        raise ConfigError("\n  - ".join([f"the inventory {path} has problems:", *problems]))
    return inventory


def _problem_text(location: tuple[int | str, ...], message: str, value: object) -> str:
    key = "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    shown = "" if message.startswith(("Field required", "Extra")) else f" = {str(value)[:60]!r}"
    return f"{key}{shown}: {message.removeprefix('Value error, ')}"
