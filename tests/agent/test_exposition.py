"""The metrics of an agent in the text format of Prometheus."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agent import exposition
from agent.exposition import MetricsServer, Samples, described, parsed_address, parsed_measure, verdicts
from everstep.errors import ConfigError
from everstep.model.finding import Health
from tests.hosts import IPV6, own_host

HOST = own_host(23)
TABLE = described(
    ("ranks", "job", "Ranks."),
    ("looks_total", "", "Looks."),
    ("machine_verdict", "verdict", "Together."),
    ("agent_info", "version", "The agent."),
)


def series(samples: Samples) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for metric in samples.metrics():
        for sample in metric.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_names_of_other_exporters_are_kept_and_own_names_get_a_prefix() -> None:
    samples = Samples(TABLE, machine="m1")
    samples.add("ranks", 2, job="gpt")
    samples.measure('node_network_up{device="eth0"}', 1, "Measured.")
    samples.measure("DCGM_FI_DEV_GPU_TEMP", 40, "Measured.")

    found = series(samples)

    assert found["everstep_ranks"] == [({"machine": "m1", "training_job": "gpt"}, 2)]
    assert found["node_network_up"] == [({"machine": "m1", "device": "eth0"}, 1)]
    assert "DCGM_FI_DEV_GPU_TEMP" in found


def test_a_series_occurs_once() -> None:
    samples = Samples(TABLE)
    samples.add("ranks", 2, job="gpt")
    samples.add("ranks", 3, job="gpt")

    assert series(samples)["everstep_ranks"] == [({"training_job": "gpt"}, 2)]


def test_too_many_series_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "SERIES", 3)
    samples = Samples(TABLE)
    for number in range(5):
        samples.add("ranks", 1, job=str(number))
    samples.measure("no name", 1, "Measured.")

    found = series(samples)

    assert len(found["everstep_ranks"]) == 3
    assert found["everstep_series_left_out"] == [({}, 3)]


def test_only_the_metric_of_the_current_verdict_is_1() -> None:
    samples = Samples(TABLE)
    verdicts(samples, "machine_verdict", Health.UNKNOWN, {})

    found = series(samples)["everstep_machine_verdict"]

    assert {labels["verdict"]: value for labels, value in found} == {"healthy": 0, "faulty": 0, "unknown": 1}


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(max_size=8), max_size=3))
def test_escaped_labels_of_measures_are_parsed(labels: dict[str, str]) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())

    assert parsed_measure("x_bytes{" + inside + "}") == ("x_bytes", labels)


@pytest.mark.parametrize("text", ["", "1x", "x{", 'x{a="b}', "x{a=b}", 'x{a="b";c="d"}'])
def test_an_invalid_measure_is_refused(text: str) -> None:
    assert parsed_measure(text) is None


@pytest.mark.parametrize("address", ["", "9464", ":9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics: .* is not (host:port|a port)"):
        parsed_address(address)


def test_an_ipv6_address_is_accepted() -> None:
    assert parsed_address("[::1]:9464") == ("::1", 9464)


def some_samples() -> Samples:
    samples = Samples(TABLE, machine="m1")
    samples.add("looks_total", 7)
    samples.add("agent_info", 1, version="1")
    return samples


@pytest.mark.parametrize("host", [HOST, pytest.param("[::1]", marks=IPV6)], ids=["ipv4", "ipv6"])
async def test_prometheus_can_read_the_metrics(host: str) -> None:
    async with MetricsServer(f"{host}:0", some_samples) as server:
        text = await asyncio.to_thread(_read, server.port, host)

    kinds = {metric.name: metric.type for metric in text_string_to_metric_families(text)}
    assert kinds == {"everstep_looks": "counter", "everstep_agent_info": "gauge", "everstep_series_left_out": "gauge"}
    assert 'everstep_looks_total{machine="m1"} 7.0' in text


async def test_an_exception_while_collecting_metrics_is_answered_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Samples:
        raise ValueError("it cannot say")

    async with MetricsServer(f"{HOST}:0", broken) as server:
        with pytest.raises(urllib.error.HTTPError, match="500") as raised:
            await asyncio.to_thread(_read, server.port)
        raised.value.close()


async def test_a_port_in_use_is_reported() -> None:
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"metrics cannot be served on {address}"):
            async with MetricsServer(address, some_samples):
                pass


def _read(port: int, host: str = HOST) -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())
