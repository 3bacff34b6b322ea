"""Settings of the monitor. An error names the wrong setting, and the settings that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent.monitor.all import INSPECTIONS, known, made, reason_codes
from agent.monitor.inspection import Limits
from agent.monitor.monitor import HANGS, UNABLE
from agent.monitor.settings import MonitorSettings
from everstep.errors import ConfigError
from everstep.model.finding import Remedy
from tests.agent.monitor.sites import SimulatedMachine

KINDS = {kind.name: kind.limits_type for kind in INSPECTIONS}


def parsed(**table: Any) -> MonitorSettings:
    return MonitorSettings.parse(table, KINDS, reason_codes(), "monitor.toml")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kernel_log": {}}, "monitor.toml: there is no inspection 'kernel_log'; there are agent, certificates"),
        ({"memory": 3}, "monitor.toml: memory must be a table"),
        ({"memory": {"available": 0.1}}, "monitor.toml: [memory]: there is no setting 'available'; there are availab"),
        ({"memory": {"available_share": 2}}, "monitor.toml: [memory]: available_share is 2: "),
        ({"memory": {"interval_s": 0}}, "monitor.toml: [memory]: interval_s is 0: "),
        ({"silence": "gpu-hot"}, "monitor.toml: silence is 'gpu-hot': "),
        ({"silence": ["gpu-hott"]}, "silence: no inspection reports 'gpu-hott': did you mean 'gpu-hot'?"),
        ({"check": [{"name": "A b", "command": ["true"]}]}, "monitor.toml: check.0.name is 'A b': "),
        ({"check": [{"name": "a", "command": []}]}, "monitor.toml: check.0.command is []: "),
        ({"check": [{"name": "a", "command": ["true"]}] * 2}, "two checks are named 'a'"),
        ({"check": [{"name": "memory", "command": ["true"]}]}, "'memory' is the name of an inspection"),
    ],
)
def test_what_is_wrong_is_said(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parsed(**table)


def test_what_is_off_does_not_look(machine: SimulatedMachine) -> None:
    all_names = {inspection.name for inspection in made(machine.site(), MonitorSettings(), machine.kept())}
    fewer = {inspection.name for inspection in made(machine.site(), parsed(memory={"off": True}), machine.kept())}

    assert all_names == set(known())
    assert all_names - fewer == {"memory"}
    assert made(machine.site(), parsed(off=True), machine.kept()) == []


def test_settings_reach_their_inspection(machine: SimulatedMachine) -> None:
    settings = parsed(cpu={"interval_s": 7}, check=[{"name": "site", "command": ["true"]}])
    inspections = {inspection.name: inspection for inspection in made(machine.site(), settings, machine.kept())}

    assert inspections["cpu"].limits.interval_s == 7
    assert inspections["site"].limits.command == ["true"]


def test_reason_codes_are_unique_and_spelled_alike() -> None:
    codes = [reason.code for kind in INSPECTIONS for reason in (*kind.reasons, UNABLE, HANGS)]
    own = [code for code in codes if code not in {UNABLE.code, HANGS.code}]

    assert len(own) == len(set(own))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code in codes)


def test_every_reason_says_what_to_do_and_none_is_sure_without_being_a_fault() -> None:
    for kind in INSPECTIONS:
        for reason in kind.reasons:
            assert reason.means
            assert reason.remedy in Remedy
            assert reason.verdict == "faulty" or not reason.sure


def test_defaults_are_those_of_the_paper() -> None:
    """The paper's intervals are 2 s for the host, 10 s for GPUs and 30 s for the network (table 3).

    Inspections that cost more, or whose facts change seldom, have longer intervals.
    """
    seldom = {"cpu", "versions", "certificates"}
    host = [kind for kind in INSPECTIONS if ".host." in kind.__module__ or ".kernel." in kind.__module__]
    assert {kind.limits_type().interval_s for kind in host if kind.name not in seldom} == {2.0}
    assert all(kind.limits_type().deadline_s > 0 for kind in INSPECTIONS)
    assert issubclass(KINDS["memory"], Limits)
