"""This module is the process of an agent: it defines the options, starts all parts of the agent, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc.aio
import structlog

from agent.checkpoints.peers.cards import find_cards
from agent.checkpoints.peers.exchange import Exchange
from agent.code.cache import FOLDER as CODE
from agent.code.cache import CodeCache
from agent.jobs.host import Host, socket_environment
from agent.jobs.trial import forget_earlier
from agent.launcher.fork_servers import ForkServers
from agent.launcher.from_template import end_of
from agent.launcher.processes import Reaper
from agent.monitor import all as all_inspections
from agent.monitor.inspection import Site
from agent.monitor.kept import KeptStates
from agent.monitor.kernel import shared
from agent.monitor.monitor import Monitor
from agent.monitor.settings import MonitorSettings
from agent.reporting import rank_logs
from agent.reporting.observations import ObservationLog
from agent.security import RELOAD_S, ClientSecurity, Requirements, ServerSecurity
from agent.server.endpoint import add_health, listening
from agent.server.idempotency import RequestMemory
from agent.server.job_registry import JobRegistry
from agent.server.service import AgentService
from agent.state.disk import StateDisk
from agent.state.live import FOLDER as LIVE
from agent.state.live import LiveLines, LiveRecords
from agent.state.reads import Reads
from agent.v1 import agent_pb2_grpc
from everstep.base.addresses import ANY_PORT, Address, Ports, parse_address_with_ports
from everstep.errors import AgentError, ConfigError
from everstep.rank import environment
from everstep.system import capabilities
from everstep.system import private_files as private
from everstep.system.memory import is_hugetlbfs
from everstep.system.procfs import boot_id

SPARED = ("checkpoints", CODE)
"""Folders in the state folder that may be links to a larger disk. The check of the state folder's permissions leaves
them out: the user chooses the permissions of the checkpoints, and the folder of code is checked separately."""
DRAIN_S = 0.2
"""Step records are copied from the mapped files at this interval, seconds. The mapped file of a rank holds the last
4096 records."""
ROTATE_S = 1.0
CLOSE_S = 2.0
"""When the agent ends, it waits this long for pending writes to its disk, seconds."""
COLLECT_AFTER = (700, 10, 10)
"""Thresholds of the garbage collector after the imports. They are Python's defaults, because higher thresholds would
leave garbage in memory for longer, and it may have large buffers."""
FORK_SERVERS = "fork-servers"
"""Name of the folder with the sockets of fork servers."""
FAKE_GPUS = "fake-gpus.json"
"""Name of the file with simulated GPUs for drills, in the state folder of an agent of a local cluster."""

logger = structlog.get_logger()


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent."""

    machine: str
    listen: str
    """``host:port`` for gRPC, or ``host:first-last``; the rendezvous stores listen on the same host."""
    state_dir: Path
    shm_dir: Path
    data_cards: tuple[str, ...] = ()
    """Network cards for backups: interfaces or addresses; empty: the card with the host of ``listen``."""
    data_ports: Ports = ANY_PORT
    """Ports of the data port."""
    prewarm: bool = False
    """Keep a fork server ready for the next job."""
    template: Path | None = None
    """Socket of the template from which fork servers are forked; None: the agent starts them itself."""
    security: ServerSecurity = field(default_factory=ServerSecurity)
    """What callers of this agent must present."""
    peers: ClientSecurity = field(default_factory=ClientSecurity)
    """What this agent presents to other agents."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    """The settings of the inspections."""
    metrics: str = ""
    """``host:port`` where metrics are served for Prometheus; empty: they are not served."""
    log_bytes: int = 64 << 20
    """A rank's log that is larger than this is rotated, bytes."""
    log_backups: int = 3

    @property
    def host(self) -> str:
        """The host part of ``listen``.

        Raises:
            ConfigError: ``listen`` is not ``host:port``.
        """
        try:
            return parse_address_with_ports(self.listen)[0]
        except ValueError as error:
            raise ConfigError(f"--listen: {error}") from error


async def serve(options: AgentOptions) -> None:
    """Serve until SIGTERM or SIGINT. Ranks and the fork servers of jobs continue to run after that.

    Raises:
        ConfigError: an option is invalid, the port is in use, a folder is not private to this user, or another agent
            uses the state folder.
    """
    gc.freeze()  # imported objects are never collected
    gc.set_threshold(*COLLECT_AFTER)
    capabilities.keep_from_children()
    options.security.check(options.host)
    if options.metrics:
        # Imported only here and in _metrics, because an agent without metrics does not need the library.
        from agent.exposition import parsed_address

        parsed_address(options.metrics)
    requirements = Requirements(options.security)
    credentials = requirements.credentials()
    if credentials and options.peers.ca_file is None:
        logger.warning("agents cannot reach each other for backups and restores: give --ca-file")
    structlog.contextvars.bind_contextvars(machine=options.machine)
    for folder in (options.state_dir, options.shm_dir):
        private.make_folder(folder)
        private.check_tree(folder, spared=SPARED)
    if is_hugetlbfs(options.shm_dir):
        raise ConfigError(
            f"--shm-dir {options.shm_dir} is on hugetlbfs, where checkpoints cannot be saved: use a tmpfs, which "
            f"has huge pages too: mount -t tmpfs -o size=…G,huge=within_size tmpfs {options.shm_dir}"
        )
    if (options.state_dir / CODE).exists():
        private.check_tree(private.make_folder(options.state_dir / CODE), by_programs=True)
    with _only_agent(options.state_dir):
        server, address = listening(options.listen, credentials, requirements.interceptors())
        await _run(options, server, address, requirements)


async def _run(options: AgentOptions, server: grpc.aio.Server, address: Address, requirements: Requirements) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    reaper = Reaper(partial(end_of, options.template) if options.template else None)
    reaper.install()
    cards = find_cards(options.host, options.data_cards)
    if cards.why_not:
        logger.warning("ranks of this machine have no backups", reason=cards.why_not)
    elif cards.without_speed:
        logger.warning("backups are not limited: the speed of their cards is not known", cards=cards.without_speed)
    try:
        exchange = Exchange(options.machine, options.host, cards, options.data_ports, options.peers)
    except OSError as error:
        raise ConfigError(f"the agent cannot listen for other agents' data (--data-port): {error.strerror}") from error
    disk, reads = StateDisk(), Reads()
    live = private.make_folder(options.shm_dir / LIVE)
    records = LiveRecords(private.make_folder(live / "jobs"), options.state_dir / "jobs", disk)
    host = Host(
        machine=options.machine,
        address=options.host,
        sockets=socket_environment(options.host),
        state_dir=options.state_dir,
        shm_dir=options.shm_dir,
        disk=disk,
        reads=reads,
        records=records,
        log=ObservationLog(_lines(live, options, "observations.jsonl", disk), options.machine),
        reaper=reaper,
        fork_servers=ForkServers(
            live / FORK_SERVERS,
            prewarm=options.prewarm,
            template=options.template,
        ),
        exchange=exchange,
        code=CodeCache(options.state_dir / CODE, reads, options.machine),
    )
    jobs = JobRegistry(host, RequestMemory(_lines(live, options, "requests.jsonl", disk)))
    host.code.in_use = jobs.code_in_use
    monitor = _monitor(options, jobs, live)
    service = AgentService(jobs, monitor)
    adopted = await service.recover()
    forget_earlier(host)
    exchange.port.start(jobs.copies_of)
    host.fork_servers.warm_up()
    agent_pb2_grpc.add_AgentServicer_to_server(service, server)
    await add_health(server)
    served = await _metrics(options, jobs, monitor)
    await server.start()
    data = [str(one) for one in exchange.port.addresses]
    logger.info("agent serves", listen=str(address), data=data, pid=os.getpid(), adopted=adopted)
    host.spawn(host.code.recover())
    host.spawn(host.fork_servers.keep_warm())
    host.spawn(monitor.run())
    host.spawn(_reload(requirements, reads))
    host.spawn(_drain(jobs))
    host.spawn(_rotate(jobs, options))
    await ended.wait()
    logger.info("agent ends; its ranks continue")
    await served.aclose()
    await server.stop(0.2)
    for task in list(host.tasks):
        task.cancel()
    for runner in jobs.runners.values():
        await runner.detach()
    service.diagnoser.close()
    await exchange.close()
    await host.fork_servers.close(end_warm=True)
    jobs.memory.close()
    host.log.close()
    disk.close(CLOSE_S)


def _monitor(options: AgentOptions, jobs: JobRegistry, live: Path) -> Monitor:
    host, cluster = jobs.host, os.environ.get(environment.CLUSTER)
    site = Site(
        machine=options.machine,
        host=options.host,
        state_dir=options.state_dir,
        shm_dir=options.shm_dir,
        # In a local cluster the agents of all machines run on one computer. Each agent reads only the lines of the
        # kernel log and the simulated GPUs of its own machine.
        kernel_log_tag=shared.tag_of(cluster, options.machine, options.state_dir) if cluster else "",
        fake_gpus=options.state_dir / FAKE_GPUS if cluster else None,
        shared_folders=(options.state_dir.parent, options.shm_dir.parent) if cluster else (),
        certificates=tuple(filter(None, (options.security.tls_cert, options.peers.ca_file, options.peers.cert_file))),
        disk_problem=lambda: host.disk.problem,
        ranks=jobs.ranks_seen,
        variables=jobs.variables_seen,
    )
    boot = shared.boot_of(options.state_dir) if cluster else ""
    kept = KeptStates(live, options.state_dir, host.disk, boot=f"{boot_id()} {boot}" if boot else None)

    inspections = all_inspections.made(site, options.monitor, kept)
    return Monitor(inspections, kept, host.log.finding_changed, options.monitor.silence)


async def _metrics(options: AgentOptions, jobs: JobRegistry, monitor: Monitor) -> contextlib.AsyncExitStack:
    """Serve metrics, if the options request it, until the returned stack is closed."""
    served = contextlib.AsyncExitStack()
    if options.metrics:
        from agent.exposition import MetricsServer
        from agent.server.metrics import samples_of

        server = await served.enter_async_context(MetricsServer(options.metrics, partial(samples_of, jobs, monitor)))
        logger.info("metrics are served", host=server.host, port=server.port)
    return served


def _lines(live: Path, options: AgentOptions, name: str, disk: StateDisk) -> LiveLines:
    return LiveLines(live / name, options.state_dir / name, disk)


async def _reload(requirements: Requirements, reads: Reads) -> None:
    """Read the files of tokens and certificates again and again. The disk with them may hang."""
    while True:
        await asyncio.sleep(RELOAD_S)
        with contextlib.suppress(AgentError):
            await reads.do(requirements.reload)


async def _drain(jobs: JobRegistry) -> None:
    while True:
        await asyncio.sleep(DRAIN_S)
        for runner in jobs.runners.values():
            if runner.record.living():
                runner.ranks.drain()
                runner.ranks.report_metrics()


async def _rotate(jobs: JobRegistry, options: AgentOptions) -> None:
    while True:
        await asyncio.sleep(ROTATE_S)
        for runner in list(jobs.runners.values()):
            for suffix in ("out", "err"):
                with contextlib.suppress(OSError, AgentError):
                    rotated = await jobs.host.reads.do(partial(_rotated, runner.folder / "logs", suffix, options))
                    for path in rotated:
                        logger.info("rotated a log", path=str(path))


def _rotated(folder: Path, suffix: str, options: AgentOptions) -> list[Path]:
    paths = folder.glob(f"rank-*.{suffix}")
    return [path for path in paths if rank_logs.rotate(path, options.log_bytes, options.log_backups)]


@contextlib.contextmanager
def _only_agent(folder: Path) -> Iterator[None]:
    """Lock the state folder, because two agents with the same folder would overwrite each other's files."""
    with open(folder / "agent.lock", "a", opener=private.open_file) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another agent uses {folder}: stop it, or give this one a --state-dir of its own"
            ) from None
        yield
