"""Bring a local cluster up and down.

A cluster is one Temporal server, some workers and one agent per machine. All are processes of this computer under a
supervisor in the background. The files of a cluster are in ``<everstep home>/clusters/<name>``, and its shared memory
is in ``/dev/shm/everstep-<user>/<id>``; only the cluster's user can enter these folders. Agents serve only callers with
the token in the cluster's folder.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from controlplane.local import cluster_processes, mounts, ports, readiness, stopping
from controlplane.local.cluster_file import ClusterFile, everstep_home, kept_settings, lock
from controlplane.local.commands import Commands
from controlplane.local.plan import ClusterPlan, ProcessPlan, State
from controlplane.local.temporal_server import TemporalChoice, find, start_command
from controlplane.local.waiting import Progress
from controlplane.settings_files import monitor_settings, notice_settings
from everstep.base.addresses import Ports, parse_address
from everstep.errors import ClusterError
from everstep.model.machine import Machine
from everstep.rank import environment
from everstep.system import private_files as private

SHM_ROOT = Path(os.environ.get(environment.SHM_ROOT) or f"/dev/shm/everstep-{os.getuid()}")
"""Folder with the shared memory of all clusters of this user; a folder that another user owns is refused."""
TOKEN_BYTES = 32
BASE_ADDRESS = "127.0.0.11"
"""Loopback address of the first machine; further machines have the addresses after it."""
TEMPORAL_PORT, UI_PORT = 7233, 8233
"""Temporal's default ports, used when they are free."""
STOP_LIMIT_S = 60.0


def up(
    name: str = "default",
    *,
    machines: int = 4,
    standbys: int = 1,
    workers: int = 2,
    progress: Progress = lambda _: None,
    at_most: int = 0,
    base_address: str = BASE_ADDRESS,
    commands: Commands | None = None,
    agents_ca: Path | None = None,
    ledger_url: str = "",
    monitor: Path | None = None,
    notices: Path | None = None,
    port_range: Ports | None = None,
) -> ClusterFile:
    """Bring a cluster up, or grow a running one; returns when everything answers.

    Args:
        name: Name of the cluster: up to 30 of a-z, 0-9 and '-'.
        machines: Number of machines for jobs; a running cluster never shrinks.
        standbys: Number of additional machines, for replacement.
        workers: Number of worker processes.
        at_most: Upper limit to which the machine pool may grow the cluster; 0: it does not grow by itself.
        progress: Is called with a line for each part of the start.
        base_address: Address of the first machine of a new cluster, on loopback unless agents have TLS.
        commands: Programs that run instead of everstep's own; None: everstep's own.
        agents_ca: Certificate of the authority of the agents' certificates; None: the agents use no TLS.
        ledger_url: URL of a ledger; empty: a file of the cluster.
        monitor: File with the settings of inspections; None: the defaults, or the file of a running cluster.
        notices: File with the receivers of notices; None: no receivers, or the file of a running cluster.
        port_range: Ports of the agents and of their data ports; None: those of the last start, or the default.

    Raises:
        ClusterError: the name is invalid, there is no Temporal server, a port is taken, a process fails, or the running
            cluster has another file with settings.
        ConfigError: a file with settings is wrong.
    """
    home = ClusterFile.home_of(name)
    monitor_settings(monitor)
    notice_settings(notices)
    commands = commands or Commands()
    with lock(home), ports.Claims() as claims:
        private.make_folder(home)
        private.make_folder(home / "logs")
        private.replace(home / ".gitignore", "*\n")  # if the home lies in a git checkout, git must ignore it
        choice = _temporal(home, progress)
        cluster = _describe(
            name,
            choice,
            claims,
            machines=machines,
            standbys=standbys,
            workers=workers,
            at_most=at_most,
            base=base_address,
            agents_ca=agents_ca,
            ledger_url=ledger_url,
            monitor=monitor.absolute() if monitor else None,
            notices=notices.absolute() if notices else None,
            port_range=port_range,
        )
        _make_token(cluster)
        for path in stopping.remove_stale(SHM_ROOT):
            progress(f"removed {path}, which a removed cluster had left behind")
        plan = _plan(cluster, choice, commands)
        _check_ports(cluster, choice, claims)
        if choice.address:  # nothing is started for a server that does not answer
            progress(f"looking for Temporal at {cluster.temporal_address}")
            readiness.run_async(readiness.temporal_ready(choice, cluster, []))
        plan.save(home)
        cluster.save()
        _start_supervisor(cluster, progress)
        _wait(cluster, choice, progress)
    return cluster


def _temporal(home: Path, progress: Progress) -> TemporalChoice:
    """The server of a running cluster, or else the server that is found or obtained."""
    with suppress(OSError, ValueError):
        plan = ClusterPlan.load(home)
        embedded = [Path(entry.argv[0]) for entry in plan.processes if entry.kind == "temporal"]
        if embedded and cluster_processes.of_cluster(plan.cluster_id):
            return TemporalChoice("running", binary=embedded[0])
    return find(progress)


def _describe(
    name: str,
    choice: TemporalChoice,
    claims: ports.Claims,
    *,
    machines: int,
    standbys: int,
    workers: int,
    at_most: int,
    base: str,
    agents_ca: Path | None,
    ledger_url: str,
    monitor: Path | None,
    notices: Path | None,
    port_range: Ports | None,
) -> ClusterFile:
    """The description of the cluster to start, with the addresses of its last start."""
    home = ClusterFile.home_of(name).resolve()
    before = _earlier(home)
    identifier = _identifier(home)
    if before and cluster_processes.of_cluster(identifier):
        machines = max(machines, len(before.machines) - before.standbys)
        at_most = max(at_most, before.at_most)
        standbys, workers = max(standbys, before.standbys), max(workers, before.workers)
        monitor = kept_settings(name, "--monitor", monitor, before.monitor)
        notices = kept_settings(name, "--notices", notices, before.notices)
        if port_range and str(port_range) != before.ports:
            raise ClusterError(
                f"cluster {name!r} is up with the ports {before.port_range}, so it cannot use {port_range}: "
                "run 'everstep down' first, or leave --ports out"
            )
    own = f"everstep-{identifier}"
    known = {machine.name: machine for machine in before.machines} if before else {}
    chosen_ports = str(port_range) if port_range else before.ports if before else ""
    port_range = Ports.parse(chosen_ports) if chosen_ports else ports.DEFAULT
    all_machines = []
    for index in range(machines + standbys):
        host = ports.machine_host(base, index)
        machine = known.get(f"m{index}")
        if machine is None or parse_address(machine.address).port not in port_range:
            machine = Machine(name=f"m{index}", address=str(claims.choose(host, port_range)))
        all_machines.append(machine)
    if choice.address:
        address, namespace, ui_url = choice.address, choice.namespace, os.environ.get(environment.UI_URL, "")
    elif before and before.ui_url and before.temporal_address.startswith("127.0.0.1:"):
        address, namespace, ui_url = before.temporal_address, before.namespace, before.ui_url
    else:
        address = str(claims.choose("127.0.0.1", preferred=TEMPORAL_PORT))
        # Each cluster has its own namespace, so that a client that reaches another cluster's server gets an error.
        namespace, ui_url = own, f"http://{claims.choose('127.0.0.1', preferred=UI_PORT)}"
    return ClusterFile(
        name=name,
        id=identifier,
        home=home,
        shm=before.shm if before and before.shm.is_dir() else SHM_ROOT / identifier,
        temporal_address=address,
        namespace=namespace,
        task_queue=before.task_queue if before else own,
        ui_url=ui_url,
        ledger_url=ledger_url or f"sqlite:///{home / 'ledger.db'}",
        token_file=home / "token",
        agents_ca=agents_ca,
        monitor=monitor,
        notices=notices,
        ports=chosen_ports,
        machines=all_machines,
        standbys=standbys,
        at_most=at_most,
        workers=workers,
    )


def _identifier(home: Path) -> str:
    """The id of the cluster in a folder; it depends only on the folder, and differs between folders."""
    return f"{home.name}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}"


def _earlier(home: Path) -> ClusterFile | None:
    """The description of this cluster from its last start; None: it was never up."""
    for path in (home / "cluster.json", home / "last.json"):
        with suppress(OSError, ValueError):
            return ClusterFile.model_validate_json(path.read_text())
    return None


def _make_token(cluster: ClusterFile) -> None:
    """Make the token of the agents, unless it exists; only this user can read it."""
    assert cluster.token_file
    if not cluster.token_file.exists():
        private.replace(cluster.token_file, secrets.token_urlsafe(TOKEN_BYTES) + "\n")


def _plan(cluster: ClusterFile, choice: TemporalChoice, commands: Commands) -> ClusterPlan:
    processes = []
    env = {
        environment.CLUSTER: cluster.id,
        environment.HOME: str(everstep_home().resolve()),
        environment.CLUSTER_NAME: cluster.name,
        environment.LEDGER_URL: cluster.ledger_url,
        environment.VERSIONS: cluster.versions_url,
        "TEMPORAL_ADDRESS": cluster.temporal_address,
        "TEMPORAL_NAMESPACE": cluster.namespace,
        environment.TASK_QUEUE: cluster.task_queue,
        environment.AGENT_TOKEN_FILE: str(cluster.token_file),
        # The user's settings for agents of a deployed cluster do not apply to the agents of this cluster.
        environment.AGENT_CA_FILE: str(cluster.agents_ca or ""),
        environment.AGENT_CERT_FILE: "",
        environment.AGENT_KEY_FILE: "",
    }
    if choice.binary:
        command = start_command(
            choice.binary,
            port=parse_address(cluster.temporal_address).port,
            ui_port=parse_address(_ui_address(cluster)).port,
            database=cluster.database,
            namespace=cluster.namespace,
        )
        processes.append(ProcessPlan("temporal", "temporal", command))
    if commands.ledger:
        processes.append(ProcessPlan("ledger", "ledger", commands.ledger))
    agent_env = env | {environment.DATA_CARDS: "", environment.DATA_PORT: cluster.ports}
    if cluster.monitor:
        agent_env |= {environment.MONITOR: str(cluster.monitor)}
    if commands.template:
        socket = cluster.shm / "template.sock"
        agent_env |= {environment.TEMPLATE: str(socket)}
        processes.append(ProcessPlan("template", "template", commands.template(socket)))
    for machine in cluster.machines:
        state, shm = cluster.home / "machines" / machine.name, cluster.shm / machine.name
        private.make_folder(state)
        argv = commands.agent(machine, state, shm)
        processes.append(ProcessPlan(f"agent-{machine.name}", "agent", argv, agent_env))
    worker_env = env | {environment.UI_URL: cluster.ui_url, environment.NOTICES: str(cluster.notices or "")}
    processes += [ProcessPlan(f"worker-{n}", "worker", commands.worker(), worker_env) for n in range(cluster.workers)]
    return ClusterPlan(cluster.id, str(cluster.shm), processes, list(_addresses(cluster, choice).values()))


def _ui_address(cluster: ClusterFile) -> str:
    return cluster.ui_url.removeprefix("http://")


def _addresses(cluster: ClusterFile, choice: TemporalChoice) -> dict[str, str]:
    """Process name → the address on which it listens."""
    found = {f"agent-{machine.name}": machine.address for machine in cluster.machines}
    if choice.binary:
        found |= {"temporal": cluster.temporal_address, "temporal's Web UI": _ui_address(cluster)}
    return found


def _check_ports(cluster: ClusterFile, choice: TemporalChoice, claims: ports.Claims) -> None:
    """Check that the ports are free. The ports of processes that run, or that the supervisor restarts, are not
    checked."""
    running = processes(cluster).keys() | _supervised(cluster.home)
    for name, address in _addresses(cluster, choice).items():
        if name.split("'")[0] in running:
            continue
        host, port = parse_address(address)
        if not claims.claim(host, port) or not ports.is_free(host, port):
            raise ClusterError(
                f"another process uses {address}, which {name} of cluster {cluster.name!r} needs: stop that process "
                f"(ss -ltnp 'sport = :{port}' shows it), or remove {cluster.home / 'last.json'} to get new addresses"
            )


def _supervised(home: Path) -> set[str]:
    """Names of the processes that a live supervisor restarts."""
    with suppress(OSError, ValueError):
        if supervisor_of(home):
            return {entry.name for entry in ClusterPlan.load(home).processes}
    return set()


def _start_supervisor(cluster: ClusterFile, progress: Progress) -> None:
    if running := supervisor_of(cluster.home):
        cluster_processes.send(running, signal.SIGHUP)
        return
    progress("starting the supervisor")
    with open(cluster.home / "logs" / "supervisor.log", "ab", opener=private.open_file) as log:
        started = subprocess.run(
            [sys.executable, "-P", "-m", "controlplane.local.supervisor", str(cluster.home)],
            env=os.environ | {environment.CLUSTER: cluster.id},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    if started.returncode:
        last = readiness.last_line(cluster.home / "logs" / "supervisor.log")
        raise ClusterError(f"the supervisor did not start: {log.name} ends with {last!r}")


def _wait(cluster: ClusterFile, choice: TemporalChoice, progress: Progress) -> None:
    """Wait for one process after the other; all of them start at the same time."""
    progress(f"waiting for Temporal at {cluster.temporal_address}")
    temporal = ["temporal"] if choice.binary else []
    readiness.run_async(readiness.temporal_ready(choice, cluster, temporal))
    progress(f"waiting for {len(cluster.machines)} agents: {', '.join(m.name for m in cluster.machines)}")
    for machine in cluster.machines:
        readiness.agent_serves(cluster, machine.name, machine.address)
    progress(f"waiting for {cluster.workers} workers")
    names = [f"worker-{number}" for number in range(cluster.workers)]
    readiness.run_async(readiness.workers_poll(choice, cluster, names))


def down(name: str = "default", *, progress: Progress = lambda _: None, purge: bool = False) -> bool:
    """Stop a cluster: workers, agents, fork servers, ranks and Temporal; and free its shared memory.

    Args:
        name: Name of the cluster.
        progress: Is called with a line for each part of the stop.
        purge: Whether to remove the cluster's folder too, with history, ledger and logs.

    Returns:
        Whether any part of the cluster existed.

    Raises:
        ClusterError: the name is invalid, or a process cannot be stopped.
    """
    home = ClusterFile.home_of(name).resolve()
    with lock(home):
        described = home / "cluster.json"
        was_up = described.exists()
        was_up = _stop(home, progress) or was_up  # processes are found even if the cluster's files were removed
        if described.exists():
            described.rename(home / "last.json")
        if purge:
            shutil.rmtree(home, ignore_errors=True)
    return was_up


def _stop(home: Path, progress: Progress) -> bool:
    """Stop all processes of a cluster, by the supervisor or without it; returns whether there were any. The files of
    the cluster are not needed for this."""
    cluster_id, running, before = _identifier(home), supervisor_of(home), _earlier(home)
    existed = bool(running or cluster_processes.of_cluster(cluster_id))
    if running:
        cluster_processes.send(running, signal.SIGTERM)
        _follow_stopping(home, running, progress)
    if cluster_processes.of_cluster(cluster_id):  # the supervisor is dead, so this process stops the rest
        stopping.stop_all(State.load(home), cluster_id, progress)
    (home / "state.json").unlink(missing_ok=True)
    mounts.unmount(home)  # a killed drill may have left mounts
    for shm in {SHM_ROOT / cluster_id, *([before.shm] if before else [])}:
        stopping.remove_shared_memory(shm)
    if left := cluster_processes.of_cluster(cluster_id):
        raise ClusterError(f"processes of cluster {home.name!r} cannot be stopped: pids {sorted(left)}")
    return existed


def _follow_stopping(home: Path, supervisor: cluster_processes.Process, progress: Progress) -> None:
    shown = "running"

    def gone() -> bool:
        nonlocal shown
        phase = State.load(home).phase
        if phase not in (shown, "running"):
            shown = phase
            progress(phase)
        return not cluster_processes.alive(supervisor)

    if not readiness.holds(gone, STOP_LIMIT_S):
        progress("the supervisor did not end in time: killing it")
        cluster_processes.send(supervisor, signal.SIGKILL)
        cluster_processes.wait_gone([supervisor], 5.0)


def supervisor_of(home: Path) -> cluster_processes.Process | None:
    """The live supervisor of a cluster's folder; None: there is none."""
    supervisor = State.load(home).supervisor
    return supervisor if supervisor.pid and cluster_processes.alive(supervisor) else None


def processes(cluster: ClusterFile) -> dict[str, int]:
    """Name → pid of the cluster's own live processes: ``temporal``, ``worker-0``, ``agent-m0``, …"""
    state = State.load(cluster.home)
    return {name: running.pid for name, running in state.processes.items() if cluster_processes.alive(running.process)}


def restart_counts(cluster: ClusterFile) -> dict[str, int]:
    """Name → number of restarts by the supervisor since the cluster came up."""
    return {name: running.restarts for name, running in State.load(cluster.home).processes.items()}
