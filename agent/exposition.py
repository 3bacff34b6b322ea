"""This module serves the metrics of a process to Prometheus: it collects samples and runs the HTTP server.

Agents and workers share this module. Names follow the rules of Prometheus: base units, and the suffix ``_total`` for
values that only grow. If another exporter already has a name for a metric, this name is used (``node_…`` of
node_exporter, ``DCGM_…`` of dcgm-exporter, ``process_…`` of client libraries); all other names begin with
``everstep_``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from everstep.base.addresses import Address, parse_address
from everstep.errors import ConfigError
from everstep.model.finding import Health

PREFIX = "everstep_"
FOREIGN = ("node_", "DCGM_", "process_")
"""The first parts of names that belong to other exporters."""
RENAMED = {"job": "training_job", "instance": "of_instance"}
"""Label that Prometheus sets itself → the name that is used here instead."""
SERIES = 1000
"""The largest number of series of one metric; further series are left out, and counted in the metric ``LEFT_OUT``."""
ANSWER_S = 5.0
"""A request whose samples are not collected within this time gets an error, seconds; Prometheus waits 10 s."""

_KINDS = {"_total": "counter", "_info": "info"}
_MEASURE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Described:
    """The description of one metric, for the generated reference."""

    name: str
    """The name without the prefix ``everstep_``."""
    labels: tuple[str, ...]
    meaning: str

    @property
    def full_name(self) -> str:
        """The complete name of the metric."""
        return _full(self.name)


def described(*rows: tuple[str, str, str]) -> dict[str, Described]:
    """Return a table of metrics by name; each row has the name, the labels separated by blanks, and the meaning."""
    return {name: Described(name, tuple(labels.split()), meaning) for name, labels, meaning in rows}


LEFT_OUT = "series_left_out"
COMMON = described((LEFT_OUT, "", "series that were too many, or whose names cannot be read"))
"""The metrics of every process."""


class Samples:
    """The samples of one reply to Prometheus.

    Args:
        table: The metrics to which :meth:`add` may add samples.
        labels: Labels of every sample, e.g. the machine.
    """

    def __init__(self, table: Mapping[str, Described], **labels: str) -> None:
        self._table = {**table, **COMMON}
        self._labels = labels
        self._metrics: dict[str, Metric] = {}
        self._seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        self._left_out = 0

    def add(self, name: str, value: float, /, **labels: str) -> None:
        """Add a sample, unless there is one with the same name and labels.

        Args:
            name: Name of a metric in the table.
            value: The value, in the unit that the name contains.
            labels: Labels of this sample, renamed by ``RENAMED``. A label must have few different values.
        """
        self._add(name, value, self._table[name].meaning, labels)

    def _add(self, name: str, value: float, meaning: str, labels: Mapping[str, str]) -> None:
        full_name = _full(name)
        series = self._labels | {RENAMED.get(label, label): value for label, value in labels.items()}
        key = (full_name, frozenset(series.items()))
        metric = self._metrics.get(full_name)
        if key in self._seen:
            return
        if metric and len(metric.samples) >= SERIES:
            self._left_out += 1
            return
        self._seen.add(key)
        if metric is None:
            kind = next((kind for suffix, kind in _KINDS.items() if full_name.endswith(suffix)), "gauge")
            # The library appends the suffixes of counters and of info metrics itself.
            base_name = full_name.removesuffix("_total").removesuffix("_info")
            metric = self._metrics[full_name] = Metric(base_name, meaning, kind)
        metric.add_sample(full_name, series, value)

    def measure(self, text: str, value: float, meaning: str) -> None:
        """Add a measure of an inspection; ``text`` is its name, which may have labels: ``x{device="eth0"}``."""
        if parsed := parsed_measure(text):
            name, labels = parsed
            self._add(name, value, meaning, labels)
        else:
            self._left_out += 1

    def metrics(self) -> list[Metric]:
        """Return all metrics, including the number of series that were left out."""
        self.add(LEFT_OUT, self._left_out)
        return list(self._metrics.values())


def _full(name: str) -> str:
    return name if name.startswith((*FOREIGN, PREFIX)) else PREFIX + name


def parsed_measure(text: str) -> tuple[str, dict[str, str]] | None:
    """Return the name and the labels of a measure; None: the text cannot be parsed."""
    measure = _MEASURE.fullmatch(text)
    if measure is None:
        return None
    name, inside = measure[1], measure[2] or ""
    labels = list(_LABEL.finditer(inside))
    if "".join(label[0] for label in labels) != inside:
        return None
    return name, {label[1]: _ESCAPED.sub(_unescaped, label[2]) for label in labels}


def _unescaped(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


class _InLoop(Collector):
    """Collects the samples in the event loop, because the measured objects are not thread-safe."""

    def __init__(self, samples: Callable[[], Samples], loop: asyncio.AbstractEventLoop) -> None:
        self._samples = samples
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        async def ask() -> list[Metric]:
            return self._samples().metrics()

        yield from asyncio.run_coroutine_threadsafe(ask(), self._loop).result(ANSWER_S)


class MetricsServer:
    """Serves ``/metrics`` over HTTP without authentication; an asynchronous context manager.

    Args:
        address: ``host:port``; port 0 is any free port.
        samples: Returns the current samples; called in the event loop in which the context is entered.
        collectors: Further collectors, which are called in any thread.
    """

    def __init__(self, address: str, samples: Callable[[], Samples], collectors: Iterable[Collector] = ()) -> None:
        self._wanted = parsed_address(address)
        self.host = self._wanted.host
        self._samples = samples
        self._collectors = collectors
        self._server: WSGIServer | None = None

    @property
    def port(self) -> int:
        """The port of the server; 0: it does not serve."""
        return self._server.server_port if self._server else 0

    async def __aenter__(self) -> MetricsServer:
        """Begin to serve.

        Raises:
            ConfigError: the port is in use, or this machine does not have the address.
        """
        registry = CollectorRegistry()
        for collector in (_InLoop(self._samples, asyncio.get_running_loop()), *self._collectors):
            registry.register(collector)
        try:
            # The library looks up the host's full name, which may take as long as a DNS query.
            self._server, _ = await asyncio.to_thread(start_http_server, self._wanted.port, self.host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served on {self._wanted} ({error.strerror or error}): give "
                "--metrics a free port of an address of this machine"
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
            self._server = None


def parsed_address(address: str, option: str = "--metrics") -> Address:
    """Return the host and the port in the value of an option.

    Raises:
        ConfigError: the value is not ``host:port``.
    """
    try:
        return parse_address(address)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def verdicts(samples: Samples, name: str, current: str, labels: Mapping[str, str]) -> None:
    """Add a sample for each verdict: 1 for the current verdict, 0 for all others.

    Args:
        samples: The samples to which they are added.
        name: Name of the metric.
        current: The current verdict.
        labels: Labels beside ``verdict``.
    """
    for verdict in dict.fromkeys((*Health, current)):
        samples.add(name, float(verdict == current), **labels, verdict=verdict)
