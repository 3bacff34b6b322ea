"""This module lists all diagnostic tests. A new test needs a file of its own and a line here."""

from __future__ import annotations

import json

from pydantic import ValidationError

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.gpu.copies import GpuCopyTest
from agent.diagnoser.gpu.dcgm import DcgmTest, EudTest
from agent.diagnoser.host.bitwise import BitwiseTest
from agent.diagnoser.host.disk import DiskTest
from agent.diagnoser.host.memory import MemoryTest
from agent.diagnoser.network.all_gather import AllGatherTest
from agent.diagnoser.network.all_to_all import AllToAllTest
from agent.diagnoser.network.loopback import LoopbackTest
from agent.diagnoser.network.nic import NicTest
from everstep.errors import ConfigError

TESTS: tuple[type[DiagnosticTest], ...] = (
    EudTest,
    DcgmTest,
    MemoryTest,
    DiskTest,
    GpuCopyTest,
    LoopbackTest,
    AllToAllTest,
    BitwiseTest,
    AllGatherTest,
    NicTest,
)
"""All tests, in the order in which they run by default: tests between machines run last."""


def known_tests() -> dict[str, type[DiagnosticTest]]:
    """Return every test by its name."""
    return {str(kind.name): kind for kind in TESTS}


def kind_named(name: str) -> type[DiagnosticTest]:
    """Return a test by its name.

    Raises:
        ConfigError: there is no such test.
    """
    tests = known_tests()
    if name not in tests:
        raise ConfigError(f"there is no test {name!r}; there are {', '.join(tests)}")
    return tests[name]


def limits_named(name: str, settings: str) -> DiagnosticLimits:
    """Return the limits of a test.

    Args:
        name: Name of the test.
        settings: Settings that differ from the defaults, as JSON; empty: none.

    Raises:
        ConfigError: there is no such test, or a setting is wrong.
    """
    kind = kind_named(name).limits_type
    try:
        return kind.model_validate(json.loads(settings) if settings else {})
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            names = ", ".join(sorted(kind.model_fields))
            raise ConfigError(f"the test {name} has no setting {setting!r}; there are {names}") from None
        message = first["msg"].removeprefix("Value error, ")
        value = f"{setting} is {first.get('input')!r}: " if setting else ""
        raise ConfigError(f"the test {name}: {value}{message}") from None
    except ValueError as error:
        raise ConfigError(f"the test {name}: its settings are not JSON: {error}") from None
