"""The demonstration: a training job runs without a fault, then with one rank killed, and both runs are compared."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from activities.ledger.ledger import Ledger
from activities.ledger.records import IncidentRecord
from console.terminal import aligned
from console.views.display import Display, Ending, Lines, Terminal
from console.views.follower import EXIT_DETACHED, Follower
from console.views.incident_report import report_blocks
from controlplane import text
from controlplane.local import cluster as local
from controlplane.local.cluster_file import everstep_home
from drills import Drill, DrillCluster, DrillRequest, DrillResult, drill_request
from drills.clusters.local import silent
from drills.runner import References
from everstep.errors import EverstepError

NAME = "demo"
"""Name of the cluster, and of the job whose rank is killed."""
KILLED_RANK, AT_STEP, STEPS = 5, 20, 60
START_LIMIT_S = 60.0
"""Time limit for the start of the job that is followed, seconds."""


class DemoInterrupted(Exception):  # control flow, not an error
    """The user interrupted the demonstration by Ctrl-C."""


class DemoCluster(DrillCluster):
    """The cluster of the demonstration: always a new cluster, with its own name in the user's everstep home."""

    def place(self) -> tuple[Path, str]:
        """Remove the cluster of an earlier demonstration; returns the everstep home and the name of the new cluster."""
        if local.down(NAME, progress=self.say, purge=True):
            self.say("took down the cluster of an earlier demonstration, which was still up")
        return everstep_home().resolve(), NAME

    def clear(self) -> None:
        """Remove the cluster's own folder; the everstep home holds other clusters too."""
        shutil.rmtree(self.home, ignore_errors=True)

    def next_name(self, what: str) -> str:
        """A short name for the next job, which is easy to type."""
        return what if what == "reference" else NAME


class Narrator:
    """Prints the parts of the demonstration with the seconds since its start."""

    def __init__(self, *, as_json: bool) -> None:
        self.out = sys.stderr if as_json else sys.stdout
        self._began = time.monotonic()
        self._number = 0

    def part(self, line: str) -> None:
        """Print the title of a new part of the demonstration."""
        self._number += 1
        print(f"\n[{self._seconds()}]  {self._number}. {line}", file=self.out, flush=True)

    def say(self, line: str) -> None:
        """Print a line about the current part."""
        print(f"{'':10}  {line}", file=self.out, flush=True)

    def lines(self, lines: Sequence[str]) -> None:
        """Print lines without the time."""
        print("\n".join(lines), file=self.out, flush=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:7.1f} s"


class DemoDisplay:
    """The display of the followed job, without the lines that it prints when the job ends."""

    def __init__(self, inner: Display) -> None:
        self.tick = inner.tick
        self.incident = inner.incident
        self.note = inner.note
        self.problem = inner.problem
        self.started = inner.started
        self._inner = inner

    def ended(self, ending: Ending) -> None:
        """Remove the progress bar; the narrator prints the result."""
        self._inner.ended(Ending(ending.outcome, ending.headline, (), ending.exit_code))


async def run_demo(*, keep: bool, as_json: bool) -> int:
    """Run the demonstration; returns the exit code.

    Raises:
        EverstepError: the cluster does not start, or the job does not even run without a fault.
    """
    narrator = Narrator(as_json=as_json)
    request = drill_request(fault="kill-rank", ranks=[KILLED_RANK], at_step=AT_STEP, steps=STEPS)
    cluster = DemoCluster(keep=keep, say=narrator.say)
    _end_orderly()
    narrator.part("A local cluster: Temporal, two workers, one agent for each of 4 machines and 1 standby")
    try:
        async with cluster:
            try:
                result, incident, link = await _act(cluster, request, narrator)
            except BaseException:
                cluster.keep = False  # an interrupted demonstration has no result to inspect
                raise
            narrator.part("The result")
            narrator.lines(summary_lines(result, incident, link))
            narrator.lines(_afterwards(cluster, keep=keep))
            if keep:
                cluster.say = silent  # the command that takes it down was printed above
            else:
                narrator.part("The cluster is taken down")
    except (DemoInterrupted, asyncio.CancelledError):
        narrator.say("interrupted: the cluster was taken down, and no process is left")
        return EXIT_DETACHED
    if cluster.leaked:
        result.leaked += cluster.leaked
        result.problems.append(f"left behind: {', '.join(cluster.leaked[:5])}")
        result.ok = False
        narrator.say(result.problems[-1])
    if as_json:
        print(result.model_dump_json(indent=2))
    verdict = "the job recovered, and its losses equal those without a fault" if result.ok else "NOT as expected"
    narrator.lines(["", f"demo: {verdict}"])
    return 0 if result.ok and result.losses_match else 1


def _end_orderly() -> None:
    """Let SIGTERM and a closed terminal end the demonstration like Ctrl-C: the cluster is taken down."""
    task = asyncio.current_task()
    if task is not None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _act(
    cluster: DemoCluster, request: DrillRequest, narrator: Narrator
) -> tuple[DrillResult, IncidentRecord | None, str]:
    spec = request.spec(NAME, {})
    topology = spec.topology()
    machine = cluster.machines[topology.machine(KILLED_RANK)].name
    narrator.say(f"Web UI: {cluster.file.ui_url}/namespaces/{cluster.file.namespace}/workflows")
    narrator.part(f"A GPT is trained without a fault: {topology.world_size} ranks ({topology.text}), {STEPS} steps")
    references = References()
    began = time.monotonic()
    await references.of(cluster, spec)
    narrator.say(f"{STEPS} steps done in {time.monotonic() - began:.1f} s; the losses of every rank are recorded")
    narrator.part(f"The same job again; in step {AT_STEP} rank {KILLED_RANK} on {machine} is killed by SIGKILL")
    drill = asyncio.create_task(Drill(cluster, request, references).run())
    try:
        await _follow(cluster, drill, as_json=narrator.out is sys.stderr)
        narrator.say("comparing all losses, and searching for processes and files that were left behind")
        result = await drill
    finally:
        drill.cancel()
        await asyncio.gather(drill, return_exceptions=True)
    incident: IncidentRecord | None = None
    ledger = await cluster.control.ledger()
    if ledger is not None and result.incidents:
        with suppress(EverstepError):
            incident = await ledger.call(Ledger.incident, result.incidents[0])
    link = cluster.control.link(result.incidents[0]) if result.incidents else ""
    result.links = [cluster.control.link(incident_id) for incident_id in result.incidents if cluster.keep]
    return result, incident, link


async def _follow(cluster: DemoCluster, drill: asyncio.Task[DrillResult], *, as_json: bool) -> None:
    """Show the job while the drill runs."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        if drill.done() or time.monotonic() > deadline:
            return  # the drill's own error says more
        with suppress(EverstepError):
            state = await cluster.control.state(NAME)
            break
        await asyncio.sleep(0.1)
    inner: Display = Terminal() if sys.stdout.isatty() and not as_json else Lines(sys.stderr if as_json else None)
    display = DemoDisplay(inner)
    display.started(NAME, {}, [])
    ending = await Follower(cluster.control, state, display, attached=False).follow()
    display.ended(ending)
    _end_orderly()  # the follower has removed the signal handlers
    if ending.outcome == "detached":
        raise DemoInterrupted


def summary_lines(result: DrillResult, incident: IncidentRecord | None, link: str) -> list[str]:
    """The table at the end, and the incident's report."""
    fault_ns = incident.fault_ns if incident else None
    rows = [
        ("crash", f"rank {KILLED_RANK} killed by SIGKILL in step {AT_STEP}, at {text.clock(fault_ns)}"),
        ("detected", f"{text.duration(result.detected_s)} after the fault, {', '.join(result.incidents)}"),
        ("recovered", f"{text.duration(result.recovered_s)} after the fault every rank had completed a step again"),
        ("steps lost", text.DASH if result.steps_lost is None else str(result.steps_lost)),
        ("losses", _losses(result)),
        (
            "copies",
            f"{result.duplicates} RANKS RAN TWICE at the same time" if result.duplicates else "no rank ran twice",
        ),
        ("left behind", "nothing" if not result.leaked else ", ".join(result.leaked[:5])),
        ("ETTR", text.ratio(result.ettr)),
        *([("incident", link)] if link else []),
        *(("problem", problem) for problem in result.problems),
    ]
    lines = aligned(rows, "  ")
    if incident is not None:
        for block in report_blocks(incident)[1:3]:
            lines += ["", f"  {block.title}", *aligned(block.rows, "    ")]
    return lines


def _losses(result: DrillResult) -> str:
    if result.losses_match is None:
        return "not compared"
    word = "equal bit for bit to those" if result.losses_match else "DIFFERENT from those"
    return f"{word} without a fault: {result.steps} steps, all ranks"


def _afterwards(cluster: DemoCluster, *, keep: bool) -> list[str]:
    if not keep:
        return ["", "  The links above end with the cluster. 'everstep demo --keep' leaves it up."]
    rows = [
        ("see", f"{cluster.file.ui_url}/namespaces/{cluster.file.namespace}/workflows"),
        ("", f"everstep status --cluster {NAME}"),
        ("", f"everstep incident {NAME}/1 --cluster {NAME}"),
        ("", f"everstep logs {NAME} --rank {KILLED_RANK} --cluster {NAME}"),
        ("take it down", f"everstep down --cluster {NAME} --purge"),
    ]
    return ["", "  The cluster stays up:", *aligned(rows, "    ")]
