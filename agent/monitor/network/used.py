"""This module decides which network interfaces and ports jobs use. Only these can be a reason to evict the machine.

NCCL and gloo read the names from variables (NCCL's user guide, ``NCCL_SOCKET_IFNAME`` and ``NCCL_IB_HCA``; the syntax
follows ``parseStringList`` and ``matchIfList`` of NCCL's ``misc/utils.cc``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NCCL_SOCKETS, GLOO_SOCKETS, HCAS, NO_IB = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_DISABLE",
)
VARIABLES = (NCCL_SOCKETS, GLOO_SOCKETS, HCAS, NO_IB)
"""The variables that say which interfaces and ports a job uses."""
USB = ("enx", "usb")
"""Beginnings of the names of USB network cards, e.g. of a BMC. A job uses such a card only if a variable names it."""

Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NcclNames:
    """A list of names in NCCL's syntax, e.g. ``mlx5_0:1,mlx5_1``, ``=eth0`` (exactly) or ``^docker`` (all others)."""

    names: tuple[tuple[str, str], ...]
    """Names or their beginnings, each with a port; an empty port means any port."""
    exact: bool
    excluded: bool

    @classmethod
    def parse(cls, text: str) -> NcclNames:
        """Parse the value of a variable."""
        excluded = text.startswith("^")
        text = text.removeprefix("^")
        exact = text.startswith("=")
        parts = (part.strip().partition(":") for part in text.removeprefix("=").split(","))
        return cls(tuple((name, port) for name, _, port in parts if name), exact, excluded)

    def has(self, name: str, port: str = "") -> bool:
        """Return whether the list includes an interface, or a port of a device."""
        if not self.names:
            return True
        is_named = any(
            (name == one if self.exact else name.startswith(one)) and (not wanted or not port or wanted == port)
            for one, wanted in self.names
        )
        return is_named is not self.excluded


def uses_interface(name: str, jobs: Iterable[Variables]) -> bool:
    """Return whether the variables of a job name an interface."""
    for variables in jobs:
        if name in variables.get(GLOO_SOCKETS, "").split(","):
            return True
        if text := variables.get(NCCL_SOCKETS):
            names = NcclNames.parse(text)
            if names.has(name) and not (names.excluded and name.startswith(USB)):
                return True
    return False


def uses_port(device: str, port: str, jobs: Iterable[Variables]) -> bool | None:
    """Return whether the variables of a job name an InfiniBand or RoCE port.

    None: the variables of a job name no port, so NCCL uses every active port.
    """
    answers: list[bool | None] = []
    for variables in jobs:
        if variables.get(NO_IB) == "1":
            answers.append(False)
        elif text := variables.get(HCAS):
            answers.append(NcclNames.parse(text).has(device, port))
        else:
            answers.append(None)
    if True in answers:
        return True
    return None if None in answers or not answers else False
