"""What Prometheus reads: samples by name and label, and the HTTP server that gives them.

Agents and workers share it. Names follow Prometheus: base units, ``_total`` for what only grows. What other exporters
have names for keeps them (``node_…`` of node_exporter, ``DCGM_…`` of dcgm-exporter, ``process_…`` of client
libraries); all else begins with ``everstep_``.
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

from everstep.errors import ConfigError
from everstep.model.finding import Health

PREFIX = "everstep_"
FOREIGN = ("node_", "DCGM_", "process_")
"""Beginnings of names that are other exporters'."""
RENAMED = {"job": "training_job", "instance": "of_instance"}
"""Labels that Prometheus gives what it reads itself, and what they are called instead."""
SERIES = 1000
"""Of one metric, at most; what is beyond is left out, and counted in ``everstep_series_left_out``."""
ANSWER_S = 5.0
"""A process that does not say within this time what it measured answers with an error (Prometheus waits 10 s)."""

_KINDS = {"_total": "counter", "_info": "info"}
_MEASURE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Described:
    """One metric, as the reference lists it."""

    name: str
    """Without what every name of everstep begins with."""
    labels: tuple[str, ...]
    meaning: str

    @property
    def full_name(self) -> str:
        """The name that Prometheus reads."""
        return _full(self.name)


def described(*rows: tuple[str, str, str]) -> dict[str, Described]:
    """A table of metrics: name, labels with blanks between, meaning."""
    return {name: Described(name, tuple(labels.split()), meaning) for name, labels, meaning in rows}


LEFT_OUT = "series_left_out"
COMMON = described((LEFT_OUT, "", "series that were too many, or whose names cannot be read"))
"""Every process serves these."""


class Samples:
    """The samples of one answer.

    Args:
        table: The metrics that :meth:`add` may be given.
        labels: Of every sample, e.g. the machine.
    """

    def __init__(self, table: Mapping[str, Described], **labels: str) -> None:
        self._table = {**table, **COMMON}
        self._labels = labels
        self._metrics: dict[str, Metric] = {}
        self._seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        self._left_out = 0

    def add(self, name: str, value: float, /, **labels: str) -> None:
        """Add one sample of the table; of two with the same name and labels the first counts.

        Args:
            name: Without what every name of everstep begins with; with ``_total`` where it only grows.
            value: In the unit that the name says.
            labels: Beside those of every sample, ``RENAMED``; their values must be few.
        """
        self._add(name, value, self._table[name].meaning, labels)

    def _add(self, name: str, value: float, meaning: str, labels: Mapping[str, str]) -> None:
        whole = _full(name)
        series = self._labels | {RENAMED.get(label, label): value for label, value in labels.items()}
        key = (whole, frozenset(series.items()))
        metric = self._metrics.get(whole)
        if key in self._seen:
            return
        if metric and len(metric.samples) >= SERIES:
            self._left_out += 1
            return
        self._seen.add(key)
        if metric is None:
            kind = next((kind for suffix, kind in _KINDS.items() if whole.endswith(suffix)), "gauge")
            # The library adds the suffix of a counter, or of what is only there for its labels.
            metric = self._metrics[whole] = Metric(whole.removesuffix("_total").removesuffix("_info"), meaning, kind)
        metric.add_sample(whole, series, value)

    def measure(self, text: str, value: float, meaning: str) -> None:
        """Add what an inspection measured: a name that may have labels, ``x{device="eth0"}``."""
        if parsed := parsed_measure(text):
            name, labels = parsed
            self._add(name, value, meaning, labels)
        else:
            self._left_out += 1

    def metrics(self) -> list[Metric]:
        """All of them."""
        left_out = self._left_out
        self.add(LEFT_OUT, left_out)
        return list(self._metrics.values())


def _full(name: str) -> str:
    return name if name.startswith((*FOREIGN, PREFIX)) else PREFIX + name


def parsed_measure(text: str) -> tuple[str, dict[str, str]] | None:
    """Name and labels of a measure; None: it has neither form."""
    whole = _MEASURE.fullmatch(text)
    if whole is None:
        return None
    name, inside = whole[1], whole[2] or ""
    found = list(_LABEL.finditer(inside))
    if "".join(one[0] for one in found) != inside:
        return None
    return name, {one[1]: _ESCAPED.sub(_unescaped, one[2]) for one in found}


def _unescaped(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


class _InLoop(Collector):
    """Asks in the event loop: what is measured is not made for several threads."""

    def __init__(self, samples: Callable[[], Samples], loop: asyncio.AbstractEventLoop) -> None:
        self._samples = samples
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        async def ask() -> list[Metric]:
            return self._samples().metrics()

        yield from asyncio.run_coroutine_threadsafe(ask(), self._loop).result(ANSWER_S)


class MetricsServer:
    """Serves ``/metrics`` over HTTP, to whoever reaches the port; an asynchronous context.

    Args:
        address: ``host:port``; port 0 is any that is free.
        samples: Says what is so now; called in the event loop of whoever enters the context.
        collectors: Others, that may be asked in any thread.
    """

    def __init__(self, address: str, samples: Callable[[], Samples], collectors: Iterable[Collector] = ()) -> None:
        self.host, self._wanted_port = parsed_address(address)
        self._samples = samples
        self._collectors = collectors
        self._server: WSGIServer | None = None

    @property
    def port(self) -> int:
        """The port that it has; 0: it does not serve."""
        return self._server.server_port if self._server else 0

    async def __aenter__(self) -> MetricsServer:
        """Begin to serve.

        Raises:
            ConfigError: the port is taken, or the address is not of this machine.
        """
        registry = CollectorRegistry()
        for collector in (_InLoop(self._samples, asyncio.get_running_loop()), *self._collectors):
            registry.register(collector)
        try:
            # In a thread: its library looks for the host's full name, which may take as long as DNS does.
            self._server, _ = await asyncio.to_thread(start_http_server, self._wanted_port, self.host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served on {self.host}:{self._wanted_port} ({error.strerror or error}): give "
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


def parsed_address(address: str, option: str = "--metrics") -> tuple[str, int]:
    """Host and port of an option.

    Raises:
        ConfigError: it is not ``host:port``.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} is {address!r}; it must be host:port, e.g. 127.0.0.1:9464")
    return host.strip("[]"), int(port)


def verdicts(samples: Samples, name: str, now: str, labels: Mapping[str, str]) -> None:
    """One sample for each verdict, 1 for the one that holds.

    Args:
        samples: Where they go.
        name: Of the metric.
        now: The verdict that holds.
        labels: Beside ``verdict``.
    """
    for word in dict.fromkeys((*Health, now)):
        samples.add(name, float(word == now), **labels, verdict=word)
