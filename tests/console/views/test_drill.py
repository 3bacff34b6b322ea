"""The lines that a drill prints at its end."""

from __future__ import annotations

from console.views.drill import afterwards
from drills.judge.result import DrillResult


def result(*incidents: str, cluster: str = "") -> DrillResult:
    return DrillResult(fault="kill-rank", incidents=list(incidents), cluster=cluster)


def test_the_commands_for_a_kept_cluster_are_shown() -> None:
    assert afterwards([result("incident/drill-1/0001", cluster="/tmp/a b/clusters/drill-x")]) == [
        "read it       EVERSTEP_HOME='/tmp/a b' everstep incident incident/drill-1/0001 --cluster drill-x",
        "take it down  EVERSTEP_HOME='/tmp/a b' everstep down --cluster drill-x --purge",
    ]


def test_some_of_many_incidents_are_named_and_a_command_lists_all() -> None:
    runs = [result(f"incident/drill-{n}/0001", cluster="/tmp/h/clusters/d") for n in range(9)]
    said = afterwards(runs)
    assert sum(line.startswith("read it") for line in said) == 3
    assert "list all      EVERSTEP_HOME=/tmp/h everstep incidents --cluster d" in said


def test_no_command_is_shown_for_a_removed_cluster() -> None:
    assert afterwards([result("incident/drill-1/0001")]) == [
        "the incidents were removed with the cluster: --keep leaves it up"
    ]
    assert afterwards([result()]) == []
