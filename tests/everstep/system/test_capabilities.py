"""Capabilities of a process, and what the programs that it starts get of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from everstep.system.capabilities import Capability, has
from tests.capabilities import in_container, in_unit, needs_root

pytestmark = needs_root

SHOWS = "from everstep.system.capabilities import *; print([name.name for name in Capability if has(name)])"
KEEPS = f"""
import subprocess, sys
from everstep.system.capabilities import *
def children():
    return subprocess.run([sys.executable, "-P", "-c", {SHOWS!r}], capture_output=True, text=True).stdout.strip()
print(children())
keep_from_children()
print(children())
with given_to_children(Capability.SYS_PTRACE):
    print(children())
print(children())
print([name.name for name in Capability if has(name)])
"""


def lines(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("capability", [Capability.SYSLOG, Capability.SYS_PTRACE], ids=lambda one: one.name)
def test_a_container_has_the_capabilities_that_it_was_given(capability: Capability) -> None:
    command = in_container([sys.executable, "-P", "-c", SHOWS], capability.name.lower())

    assert lines(command) == [str([capability.name])]


def test_children_get_only_what_they_are_given() -> None:
    command = in_unit([sys.executable, "-P", "-c", KEEPS], "syslog", "sys_ptrace")

    both = "['SYS_PTRACE', 'SYSLOG']"
    assert lines(command) == [both, "[]", "['SYS_PTRACE']", "[]", both]


def test_what_may_not_be_given_is_not_given() -> None:
    program = f"""
import subprocess, sys
from everstep.system.capabilities import *
with given_to_children(Capability.SYS_PTRACE):
    subprocess.run([sys.executable, "-P", "-c", {SHOWS!r}])
"""
    assert lines(in_unit([sys.executable, "-P", "-c", program], "syslog")) == ["['SYSLOG']"]


def test_root_of_the_tests_has_what_tests_need() -> None:
    assert has(Capability.SYSLOG)
