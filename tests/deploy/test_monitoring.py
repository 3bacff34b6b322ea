"""The files in deploy/monitoring/ ask only for metrics that exist, in PromQL that Prometheus can read.

Other tests check that agents and workers serve the metrics of the reference: tests/agent/server/test_metrics.py,
tests/controlplane/test_worker_metrics.py, and for the network the last test here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from agent.exposition import Samples
from agent.monitor.inspection import Site
from agent.monitor.network import netlink
from agent.monitor.network.infiniband import InfinibandInspection, InfinibandLimits
from agent.monitor.network.infiniband_ports import COUNTERS
from agent.monitor.network.link import LinkInspection, LinkLimits
from agent.monitor.network.loss import LossLimits, PacketLossInspection
from agent.monitor.network.netlink import Link
from tests.metric_names import AGENT, INSPECTED, TEMPORAL, WORKER

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
SERVED = AGENT | INSPECTED | WORKER | TEMPORAL
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""Metrics that Prometheus itself adds at every scrape."""
DURATION = re.compile(r"\d+(ms|[smhdwy])")

RULES = [
    rule for group in yaml.safe_load((FOLDER / "everstep-alerts.yml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the place of each expression, and the expression with values for Grafana's variables."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")


def selected(expression: str) -> dict[str, set[str]]:
    """Return metric → labels that the selectors of an expression ask for."""
    found: dict[str, set[str]] = {}

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.setdefault(node.name or "", set()).update(one.name for one in node.matchers.matchers)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_every_expression_asks_for_metrics_and_labels_that_there_are(place: str, expression: str) -> None:
    asked = selected(expression)

    assert asked
    for name, labels in asked.items():
        there = OF_PROMETHEUS.get(name) or SERVED[name] | {"machine", "job", "instance"}
        assert labels <= there, name


def test_alerts_have_what_prometheus_wants() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert DURATION.fullmatch(rule.get("for", "1m"))
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        labels = {label for found in SERVED.values() for label in found}
        assert used <= labels | {"machine", "instance"}


def test_the_configuration_reads_the_rules_and_the_jobs_that_they_name() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    jobs = {scrape["job_name"] for scrape in config["scrape_configs"]}
    named = {job for rule in RULES for job in re.findall(r'\bjob="([^"]+)"', rule["expr"])}

    assert config["rule_files"] == ["everstep-alerts.yml"]
    assert named <= jobs


def test_the_dashboard_has_what_grafana_wants() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            assert re.findall(r"label_values\((\w+), (\w+)\)", one["definition"])


def test_the_network_inspections_measure_what_is_in_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They measure every such metric of the reference, and no other metric with such a name."""
    link = Link(4, "eth0", statistics=dict.fromkeys(netlink.STATISTICS, 0))
    monkeypatch.setattr(netlink, "links", lambda: {"eth0": link})
    monkeypatch.setattr(netlink, "addresses", dict)
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    for name, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", **dict.fromkeys(COUNTERS, "0")}.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text)
    site = Site(sys=tmp_path)
    links = LinkInspection(site, LinkLimits(), {}, same_boot=True)
    links.speeds = lambda: {"eth0": 1000}
    loss = PacketLossInspection(site, LossLimits(), {}, same_boot=True)
    ports = InfinibandInspection(site, InfinibandLimits(), {}, same_boot=True)
    samples = Samples({})
    for inspection in (links, loss, ports):
        for text, value in inspection.inspect().measures.items():
            samples.measure(text, value, "Measured.")
    links.close()

    shown = {sample.name: set(sample.labels) for metric in samples.metrics() for sample in metric.samples}

    served = {name: labels for name, labels in INSPECTED.items() if name.startswith("node_")}
    assert shown.keys() >= served.keys()
    assert {name: labels for name, labels in shown.items() if name.startswith("node_")} == served
