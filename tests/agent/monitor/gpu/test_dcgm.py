"""DCGM's health watches, read from a fake ``dcgmi``. Its output follows DCGM's source code and was not recorded."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agent.monitor.gpu.dcgm import DcgmInspection, DcgmLimits, parsed, pci_addresses_of
from agent.monitor.inspection import InspectionResult, Site
from everstep.errors import CannotInspect
from everstep.model.finding import Health

LINE = 54
"""The width at which DCGM wraps its texts."""
NOT_RUNNING = (
    "Error: unable to establish a connection to the specified host: localhost\n"
    "Error: Unable to connect to host engine. Host engine connection invalid/disconnected.\n"
)
NOT_WATCHED = "Error: Health watches not enabled. Please enable watches. \n"
DISCOVERY = """2 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:07:00.0                                         |
|        | Device UUID: GPU-0                                                   |
+--------+----------------------------------------------------------------------+
| 1      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:0A:00.0                                         |
|        | Device UUID: GPU-1                                                   |
+--------+----------------------------------------------------------------------+
1 NvSwitches found.
| 0         |
"""


def report(overall: str, **sections: dict[str, dict[str, tuple[str, str]]]) -> str:
    """Return a report with these sections, each: part → watch → (value, text)."""
    body: dict[str, Any] = {"Overall Health": {"value": overall}}
    for kind, parts in sections.items():
        body[kind] = {"children": {}}
        for number, watches in parts.items():
            errors = {
                watch: {"value": value, "overflow": textwrap.wrap(text, LINE)}
                for watch, (value, text) in watches.items()
            }
            worst = "Failure" if any(value == "Failure" for value, _ in watches.values()) else "Warning"
            body[kind]["children"][number] = {"value": worst, "children": {"Errors": {"children": errors}}}
    return json.dumps({"body": body, "header": ["Health Monitor Report"]}, indent=3)


HEALTHY = report("Healthy")


class Dcgmi:
    """The fake ``dcgmi``: it prints the content of files, and writes its arguments to the file ``asked``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.limits = DcgmLimits(command=str(folder / "dcgmi"))
        self.says(HEALTHY)
        (folder / "places").write_text(DISCOVERY)
        program = (
            "#!/bin/sh\n"
            f'echo "$*" >> {folder}/asked\n'
            f'case "$1 $4" in\n'
            f"  discovery*) cat {folder}/places;;\n"
            f'  "health -s") cp {folder}/after {folder}/says; echo "Health monitor systems set successfully.";;\n'
            f"  *) cat {folder}/says;;\n"
            "esac\n"
        )
        self.is_program(program)

    def is_program(self, text: str) -> None:
        (self._folder / "dcgmi").write_text(text)
        (self._folder / "dcgmi").chmod(0o755)

    def says(self, text: str, after_watches_are_set: str = NOT_WATCHED) -> None:
        (self._folder / "says").write_text(text)
        (self._folder / "after").write_text(after_watches_are_set)

    @property
    def asked(self) -> list[str]:
        return (self._folder / "asked").read_text().splitlines()

    def inspection(self, kept: dict[str, Any] | None = None) -> DcgmInspection:
        return DcgmInspection(Site(), self.limits, kept or {}, same_boot=True)


@pytest.fixture
def dcgmi(tmp_path: Path) -> Dcgmi:
    return Dcgmi(tmp_path)


def test_healthy(dcgmi: Dcgmi) -> None:
    assert dcgmi.inspection().inspect() == InspectionResult()
    assert dcgmi.asked == ["health -g 0 -c -j"]


def test_incidents_become_findings_about_the_same_parts_as_in_other_inspections(dcgmi: Dcgmi) -> None:
    text = "Row remap failure was detected for GPU 1, and it is out of spares."
    watches = {"Memory system": ("Failure", text), "SM system": ("Failure", "b"), "PCIe system": ("Warning", "c")}
    dcgmi.says(report("Failure", GPU={"1": watches}, Switch={"3": {"NVLINK system": ("Warning", "d")}}))
    inspection = dcgmi.inspection()
    found = {(one.item, one.reason): one for one in inspection.inspect().findings}
    assert set(found) == {
        ("GPU 0000:0a:00", "dcgm-failure"),
        ("GPU 0000:0a:00", "dcgm-warning"),
        ("Switch 3", "dcgm-warning"),
    }
    failed = found["GPU 0000:0a:00", "dcgm-failure"]
    assert (failed.verdict, failed.sure) == (Health.FAULTY, False)
    assert failed.text == "DCGM: Memory system: Row remap failure was detected for GPU 1, and it is out of spares."
    assert failed.evidence[1] == "SM system: b"
    assert found["Switch 3", "dcgm-warning"].verdict is Health.UNKNOWN
    inspection.inspect()
    assert dcgmi.asked.count("discovery -l") == 1, "the PCI addresses are queried once"


def test_a_gpu_with_an_unknown_address_has_dcgms_number(dcgmi: Dcgmi) -> None:
    dcgmi.says(report("Warning", GPU={"7": {"Thermal system": ("Warning", "warm")}}))
    (found,) = dcgmi.inspection().inspect().findings
    assert found.item == "GPU 7 of DCGM"


def test_watches_are_turned_on_if_they_are_off(dcgmi: Dcgmi) -> None:
    dcgmi.says(NOT_WATCHED, after_watches_are_set=HEALTHY)
    inspection = dcgmi.inspection()
    assert inspection.inspect() == InspectionResult()
    inspection.inspect()
    assert dcgmi.asked == ["health -g 0 -c -j", "health -g 0 -s a", "health -g 0 -c -j", "health -g 0 -c -j"]


def test_without_watches_the_gpus_are_not_inspected(dcgmi: Dcgmi) -> None:
    dcgmi.says(NOT_WATCHED)
    with pytest.raises(CannotInspect, match="Health watches not enabled"):
        dcgmi.inspection().inspect()
    dcgmi.limits = dcgmi.limits.model_copy(update={"set_watches": False})
    with pytest.raises(CannotInspect, match="Health watches not enabled"):
        dcgmi.inspection().inspect()
    assert sum("-s a" in asked for asked in dcgmi.asked) == 1


def test_without_dcgm_there_is_nothing_to_inspect(dcgmi: Dcgmi) -> None:
    dcgmi.says(NOT_RUNNING)
    assert dcgmi.inspection().inspect() == InspectionResult(note="DCGM does not run")
    dcgmi.limits = DcgmLimits(command="/nowhere/dcgmi")
    assert dcgmi.inspection().inspect() == InspectionResult(note="/nowhere/dcgmi is not installed")


def test_if_dcgm_stopped_running_the_gpus_are_not_inspected(dcgmi: Dcgmi) -> None:
    before = dcgmi.inspection()
    before.inspect()
    dcgmi.says(NOT_RUNNING)
    with pytest.raises(CannotInspect, match="unable to establish a connection"):
        dcgmi.inspection(before.kept).inspect()


def test_a_dcgmi_that_hangs_is_ended(dcgmi: Dcgmi) -> None:
    dcgmi.is_program("#!/bin/sh\nsleep 1000\n")
    dcgmi.limits = dcgmi.limits.model_copy(update={"answer_s": 0.1})
    with pytest.raises(CannotInspect, match=r"dcgmi health -g 0 -c -j did not end within 0\.1 s"):
        dcgmi.inspection().inspect()


def test_a_dcgmi_that_cannot_be_run(dcgmi: Dcgmi) -> None:
    dcgmi.is_program("#!/nowhere/sh\n")
    with pytest.raises(CannotInspect, match="cannot be run"):
        dcgmi.inspection().inspect()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "segmentation fault",
        "{}",
        "[]",
        '{"body": []}',
        '{"body": {"Overall Health": "Healthy"}}',
        '{"body": {"GPU": {}}}',
        report("Internal error"),
        '{"body": {"Overall Health": {"value": "Failure"}, "GPU": {"children": {"0": "Failure"}}}}',
        '{"body": {"Overall Health": {"value": "Healthy"',
    ],
)
def test_output_that_cannot_be_parsed_is_not_healthy(text: str) -> None:
    with pytest.raises(CannotInspect):
        parsed(text)


def test_lines_around_the_report_do_not_matter() -> None:
    assert parsed(f"a warning of the library\n{HEALTHY}\n") == []


@pytest.mark.parametrize("section", [{}, {"GPU": {"children": {"2": {"value": "Failure"}}}}])
def test_a_failure_without_incidents_is_a_failure(section: dict[str, Any]) -> None:
    (incident,) = parsed(json.dumps({"body": {"Overall Health": {"value": "Failure"}} | section}))
    assert incident.reason.code == "dcgm-failure"


def test_pci_addresses() -> None:
    assert pci_addresses_of(DISCOVERY) == {"0": "00000000:07:00.0", "1": "00000000:0A:00.0"}
    assert pci_addresses_of("another output") == {}
