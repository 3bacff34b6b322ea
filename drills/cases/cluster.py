"""The machines of a case: they run ranks in simulated time, answer the activities of workflows, and are watched.

What is broken strikes here, and whatever agents would report of it is made here. Everything that is decided from these
reports is decided by the product: what a rank's end was, whether it is an anomaly, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from activities.activity import Activity
from activities.agents.align_ranks import AlignRanks, RanksAligned
from activities.agents.await_machines import AwaitMachines
from activities.agents.check_room import CheckRoom
from activities.agents.check_version import CheckVersion, VersionChecked
from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.diagnose_machines import DiagnoseMachines
from activities.agents.find_checkpoints import FindCheckpoints
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.prepare_machines import PrepareMachines
from activities.agents.release_machines import ReleaseMachines
from activities.agents.replay_on_group import ReplayOnGroup
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from activities.agents.trace_ranks import TraceRanks
from activities.agents.vote_round import VoteRound
from activities.deliver_notice import DeliverNotice
from activities.ledger.records import NumbersUsed
from activities.make_version import MakeVersion, VersionMade
from activities.pool.look_at_machines import LookAtMachines
from activities.pool.provision_machines import ProvisionMachines
from activities.pool.ready_standbys import ReadyStandbys
from activities.pool.requests import AwaitStandbys, GiveMachinesBack, LeaseMachines, ReplaceMachines
from activities.registry import ACTIVITIES
from activities.write_to_ledger import RecordJob, WriteConclusion
from drills.cases.case import Case, Fault
from drills.cases.temporal import TASK_QUEUE, ActivityCall, S, SimulatedTemporal, UpdateRefusedError
from everstep.decisions.act.recover.confirm import RankState, judge_confirmation, judge_timeout
from everstep.decisions.blame.classify.first_cause import classification
from everstep.decisions.blame.diagnose.diagnosis import judge
from everstep.decisions.detect.job_facts import FindingSeen, JobFacts, ObservedExit, RankFacts
from everstep.decisions.detect.rules import anomalies
from everstep.model.diagnosis import BETWEEN_MACHINES, DiagnosticResult, PairResult
from everstep.model.evidence import Evidence, RankExit
from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Owner
from everstep.model.hang import HangResult
from everstep.model.incident import STILL_RUNNING, Anomaly
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.launch import Launched, Showing
from everstep.model.machine import Machine
from everstep.model.pool import (
    GiveBack,
    Leased,
    LeaseRequest,
    PollAnswers,
    PoolState,
    ReadyResult,
    Replaced,
    ReplaceRequest,
    RunningJob,
    pool_workflow_id,
)
from everstep.model.replay import GroupRun, RunEnd
from everstep.model.slow import SlowRound
from everstep.model.state_copy import Restored, StateCopy, Tier
from workflows.registry import WORKFLOWS

JOB = "case"
BEGAN_NS = 1_800_000_000 * S
"""The wall clock when a case begins."""
NOTICED_S = 0.05
"""The time from the end of a rank to the watcher."""
TICK_S = 1.0
"""The time between two checks of a watcher."""
POOL = pool_workflow_id(TASK_QUEUE)


@dataclass(eq=False)
class Broken:
    """A fault of the case, and how often it has struck."""

    fault: Fault
    number: int
    machine: str
    """The machine that is broken."""
    strikes: int = 0
    first_ns: int = 0
    version: int = 0
    """The version of the code that was running at its first strike."""


@dataclass(eq=False)
class Generation:
    """The ranks of one launch."""

    number: int
    resume_step: int
    machines: list[Machine]
    launched_ns: int
    loop_ns: int
    """When the ranks are in their loops."""
    version: int
    frozen_ns: int = 0
    """When no rank went on any more; 0: they do."""
    ends: dict[int, ObservedExit] = field(default_factory=dict)
    dying_until_ns: dict[int, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    """Ids of the anomalies that the job has accepted."""
    stopped: bool = False


class SimulatedCluster:
    """The machines of a case.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        job = case.job
        names = [f"m{number}" for number in range(job.machines + job.standbys)]
        self.machines = [Machine(name=name, address=f"10.0.0.{number}:1") for number, name in enumerate(names)]
        self.spec = JobSpec(
            name=JOB,
            script="/job.py",
            machines=job.machines,
            ranks_per_machine=job.ranks_per_machine,
            policy=job.policy,
        )
        self.world_size = job.machines * job.ranks_per_machine
        self.broken = [
            Broken(fault, number, fault.machine or f"m{fault.rank // job.ranks_per_machine}")
            for number, fault in enumerate(case.fault)
        ]
        self.temporal = SimulatedTemporal(WORKFLOWS, ACTIVITIES, self.perform, BEGAN_NS)
        self.generation: Generation | None = None
        self.first_step_ns = 0
        """When the job completed its first step; 0: not yet."""
        self.silent: set[str] = set()
        self.silent_ns: dict[str, int] = {}
        self.findings: list[MachineFinding] = []
        self.farthest = 0
        """The newest step that the job ever completed."""
        self.computed_again = 0
        self.performed: list[Activity[Any]] = []
        """Every activity that was begun, in order."""
        self._coming: list[int] = []
        """When something will happen to the machines, nanoseconds, in order."""
        self._watched: list[Callable[[], None]] = []
        """Checks of those who wait for the ranks."""

    def at(self, after_s: float, what: Callable[[], None]) -> None:
        """Let something happen to the machines after a time, seconds."""
        due_ns = self.temporal.now_ns + round(max(after_s, 0.0) * S)
        self._coming.append(due_ns)

        def happen() -> None:
            self._coming.pop(0)
            what()

        self._coming.sort()
        self.temporal.at(after_s, happen)

    @property
    def next_s(self) -> float | None:
        """The time until something happens to the machines, seconds; None: nothing will."""
        return (self._coming[0] - self.temporal.now_ns) / S if self._coming else None

    def skip(self, duration_s: float) -> None:
        """Let the job train for a time, seconds, in which nothing happens."""
        self.temporal.skip(duration_s)
        self._coming = [due_ns + round(duration_s * S) for due_ns in self._coming]

    @property
    def is_quiet(self) -> bool:
        """Whether the job trains, and nothing is wrong with its machines."""
        state: JobState = self.temporal.workflow(job_workflow_id(JOB)).state
        generation = self.generation
        trains = generation is not None and not generation.frozen_ns and state.status == "running"
        return trains and not state.pending and not self._is_unusual()

    def begin(self) -> None:
        """Start the pool and the job."""
        self.temporal.start("StandbyPool", POOL, PoolState())
        state = JobState(spec=self.spec, machines=self.machines[: self.case.job.machines])
        self.temporal.start("Job", job_workflow_id(JOB), state)
        self._tick()

    # The ranks.

    def completed(self) -> int:
        """Return the number of steps that the job's ranks have completed."""
        generation, now_ns = self.generation, self.temporal.now_ns
        if generation is None:
            return 0
        until_ns = min(generation.frozen_ns or now_ns, now_ns)
        steps = (until_ns - generation.loop_ns) / (self.case.job.step_s * S)
        return max(generation.resume_step, 0) + max(int(steps + 1e-6), 0)

    @property
    def names(self) -> list[str]:
        """The names of the machines that run the newest generation."""
        return [machine.name for machine in self.generation.machines] if self.generation else []

    def home(self, rank: int) -> str:
        """Return the machine of a rank."""
        return self.names[rank // self.case.job.ranks_per_machine]

    def _states(self) -> list[RankState]:
        generation = self.generation
        assert generation is not None
        begun = generation.loop_ns if self.temporal.now_ns >= generation.loop_ns else 0
        completed = self.completed()
        first_ns = generation.loop_ns + round(self.case.job.step_s * S)
        stepped = completed > max(generation.resume_step, 0)
        return [
            RankState(
                rank=rank,
                alive=rank not in generation.ends,
                attached=begun > 0,
                finished=False,
                completed_steps=completed,
                optimizer_steps=0,
                code=generation.ends[rank].end.code if rank in generation.ends else None,
                forked_ns=generation.launched_ns,
                joined_ns=begun,
                entered_ns=begun,
                restored_ns=begun,
                first_step_ns=first_ns if stepped else 0,
            )
            for rank in range(self.world_size)
            if self.home(rank) not in self.silent
        ]

    def _launch(self, request: LaunchRanks) -> None:
        now_ns = self.temporal.now_ns
        if self.generation is not None:
            again = self.completed() - max(request.resume_step, 0)
            self.farthest = max(self.farthest, self.completed())
            self.computed_again += max(again, 0)
        self.generation = generation = Generation(
            number=request.generation,
            resume_step=request.resume_step,
            machines=list(request.job.machines),
            launched_ns=now_ns,
            loop_ns=now_ns + round(self.case.job.start_s * S),
            version=request.job.spec.version,
        )
        first = self.case.job.start_s + self.case.job.step_s

        def stepped() -> None:
            if generation is self.generation and not generation.frozen_ns:
                if not self.first_step_ns:
                    self.first_step_ns = self.temporal.now_ns
                    self._begin_faults()
                self._changed()

        self.temporal.at(first, stepped)
        for broken in self.broken:
            if broken.strikes:
                self._strike_later(broken, generation, first + broken.fault.again_s)

    # What is broken.

    def _begin_faults(self) -> None:
        for broken in self.broken:

            def strike(broken: Broken = broken) -> None:
                if self.generation is None or self.generation.stopped or self.generation.frozen_ns:
                    if broken.fault.ends_rank or broken.fault.hangs:  # there are no ranks: it strikes the next ones
                        self.at(TICK_S, strike)
                        return
                self._strike(broken)

            self.at(broken.fault.at_s, strike)

    def _strike_later(self, broken: Broken, generation: Generation, after_s: float) -> None:
        def strike() -> None:
            if generation is self.generation and not generation.frozen_ns and not generation.stopped:
                self._strike(broken)

        if self._lasts(broken):
            self.at(max(after_s, 0.1), strike)

    def _lasts(self, broken: Broken) -> bool:
        """Whether what is broken can still strike."""
        fault, generation = broken.fault, self.generation
        if fault.times and broken.strikes >= fault.times:
            return False
        if broken.strikes and fault.for_s and self.temporal.now_ns > broken.first_ns + fault.for_s * S:
            return False
        match fault.lasts:
            case "machine":
                return broken.machine in self.names
            case "code":
                return generation is not None and generation.version == broken.version
            case "always":
                return True
            case _:
                return broken.strikes < max(fault.times, 1) or fault.for_s > 0

    def _strike(self, broken: Broken) -> None:
        if broken.strikes and not self._lasts(broken):
            return
        fault, generation, now_ns = broken.fault, self.generation, self.temporal.now_ns
        assert generation is not None
        if not broken.strikes:
            broken.first_ns, broken.version = now_ns, generation.version
        broken.strikes += 1
        if fault.finding is not None:
            self.at(fault.finding.after_s, lambda: self._report_finding(broken))
        if fault.silent:
            self._silence(broken)
        if broken.machine not in self.names and not fault.every_rank:
            return
        if fault.ends_rank or fault.hangs:
            generation.frozen_ns = now_ns
            self.farthest = max(self.farthest, self.completed())
        for rank in range(self.world_size) if fault.every_rank else [self._rank_of(broken)]:
            if fault.dying_s:
                generation.dying_until_ns[rank] = now_ns + round(fault.dying_s * S)
            if fault.ends_rank:
                self._end(rank, fault.raises, fault.log, signal=fault.signal, code=fault.exit)
        if fault.ends_rank and fault.others == "connection lost":
            self.at(0.2, lambda: self._lose_connections(generation))
        self._changed()

    def _rank_of(self, broken: Broken) -> int:
        each = self.case.job.ranks_per_machine
        return self.names.index(broken.machine) * each + (0 if broken.fault.machine else broken.fault.rank % each)

    def _end(self, rank: int, raises: str, log: str, *, signal: int = 0, code: int | None = None) -> None:
        generation, now_ns = self.generation, self.temporal.now_ns
        assert generation is not None
        if rank in generation.ends:
            return
        code = None if signal else 1 if code is None else code
        end = RankExit(
            rank=rank,
            machine=self.home(rank),
            pid=1000 + rank,
            code=code,
            signal=signal or None,
            time_ns=now_ns,
            completed_steps=self.completed(),
            exception=raises,
            log_tail=log,
            shown_steps=max(self.completed() - max(generation.resume_step, 0), 0),
            classification=classification(raises, log, -signal if signal else code),
        )
        seen = ObservedExit(id=f"{end.machine}-{generation.number}-{rank}", end=end, finished=False, heard_ns=now_ns)
        self.at(NOTICED_S, lambda: (generation.ends.setdefault(rank, seen), self._changed()) and None)

    def _lose_connections(self, generation: Generation) -> None:
        if generation is self.generation and not generation.stopped:
            lost = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5512"
            for rank in range(self.world_size):
                self._end(rank, lost, "")

    def _silence(self, broken: Broken) -> None:
        machine = broken.machine
        self.silent.add(machine)
        self.silent_ns[machine] = self.temporal.now_ns
        if machine in self.names and self.generation is not None and not self.generation.frozen_ns:
            self.generation.frozen_ns = self.temporal.now_ns

        def back() -> None:
            self.silent.discard(machine)
            self._changed()

        if broken.fault.for_s:
            self.at(broken.fault.for_s, back)

    def _report_finding(self, broken: Broken) -> None:
        given = broken.fault.finding
        assert given is not None
        finding = Finding(
            inspection=given.inspection,
            source=given.source,
            reason=given.reason,
            verdict=given.verdict,
            item=given.item,
            text=given.text or given.reason,
            owner=given.owner,
            sure=given.sure,
            since_ns=self.temporal.now_ns,
        )
        found = MachineFinding(machine=broken.machine, finding=finding)
        if found.about in {one.about for one in self.findings}:
            return
        self.findings.append(found)
        if given.for_s:
            self.at(given.for_s, lambda: self.findings.remove(found))
        self._changed()

    # The watcher.

    def _tick(self) -> None:
        self._changed()
        if self.temporal.is_open(job_workflow_id(JOB)):
            self.temporal.at(TICK_S if self._is_unusual() else 10 * TICK_S, self._tick)

    def _is_unusual(self) -> bool:
        generation = self.generation
        here = set(self.names)
        wrong = not here.isdisjoint(self.silent) or any(found.machine in here for found in self.findings)
        return wrong or (generation is not None and generation.frozen_ns > 0)

    def _changed(self) -> None:
        """Whoever watches the ranks looks again."""
        for look in list(self._watched):
            look()
        generation = self.generation
        if generation is None or generation.stopped:
            return
        for anomaly in anomalies(self._facts(generation)):
            if anomaly.id not in generation.reported:
                generation.reported.add(anomaly.id)
                self._report(generation, anomaly)
            return

    def _facts(self, generation: Generation) -> JobFacts:
        now_ns, completed = self.temporal.now_ns, self.completed()
        stepped = completed > max(generation.resume_step, 0)
        quiet_ns = now_ns - max(generation.frozen_ns, generation.loop_ns) if generation.frozen_ns else 0
        ranks = [
            RankFacts(
                rank=rank,
                machine=self.home(rank),
                alive=rank not in generation.ends,
                completed_steps=completed,
                steps=completed,
                stepped=stepped,
                steps_since=max(completed - max(generation.resume_step, 0), 0),
                in_loop=now_ns >= generation.loop_ns,
                left_loop=False,
                saved_step=completed,
                saved_ns=now_ns,
                first_step_ns=generation.loop_ns if stepped else 0,
                heard_ns=now_ns,
            )
            for rank in range(self.world_size)
        ]
        here = [name for name in self.names if name in self.silent]
        return JobFacts(
            spec=self.spec,
            generation=generation.number,
            now_ns=now_ns,
            exits=dict(generation.ends),
            ranks=ranks,
            quiet_s=quiet_ns / S if stepped else 0.0,
            typical_step_s=self.case.job.step_s,
            longest_step_s=self.case.job.step_s,
            last_step=completed,
            machine_names=self.names,
            silent=here,
            unheard_s={name: (now_ns - self.silent_ns[name]) / S for name in here},
            findings=[
                FindingSeen(
                    id=f"{found.machine}-finding-{number}",
                    machine=found.machine,
                    finding=found.finding,
                    heard_ns=found.finding.since_ns,
                    sequence=number + 1,
                )
                for number, found in enumerate(self.findings)
                if found.machine in self.names and f"told-{found.about}" not in generation.reported
            ],
        )

    def _report(self, generation: Generation, anomaly: Anomaly) -> None:
        name = "observe" if anomaly.symptom in STILL_RUNNING else "report"

        def answered(answer: Any) -> None:
            if isinstance(answer, UpdateRefusedError):  # it is too early: the watcher sends it again
                generation.reported.discard(anomaly.id)
            elif name == "observe":
                generation.reported.update(f"told-{found.about}" for found in anomaly.findings)

        self.temporal.update(job_workflow_id(JOB), name, anomaly, str, answered)

    # The activities.

    def perform(self, call: ActivityCall) -> None:
        """Begin an activity."""
        request, costs = call.request, self.case.costs
        self.performed.append(request)
        after = self.temporal.at
        match request:
            case PrepareMachines():
                silent = [machine.name for machine in request.job.machines if machine.name in self.silent]
                if silent:
                    after(request.patience_s, lambda: call.fail(f"{silent[0]} does not answer", "AgentUnreachable"))
                else:
                    after(costs.launch_s, lambda: call.complete(1.0))
            case StopRanks():
                self._stop(call, request)
            case LaunchRanks():
                self._begin_launch(call, request)
            case ConfirmSteps():
                self._confirm(call, request)
            case AlignRanks():
                after(self.case.job.step_s, lambda: call.complete(RanksAligned(step=self.completed())))
            case AwaitMachines():
                self._await_machines(call, request)
            case FindCheckpoints():
                after(costs.stop_s, lambda: call.complete(Evidence(generation=0, searched=True)))
            case CheckRoom():
                call.complete("")
            case RestoreCheckpoints():
                done = Restored(moved=request.copies, bytes=1, seconds=costs.restore_s)
                after(costs.restore_s, lambda: call.complete(done))
            case TraceRanks():
                self._trace(call, request)
            case VoteRound():
                round_ = SlowRound(number=request.number, looks=10, job="none", job_why="no rank is slower")
                after(request.round_s, lambda: call.complete(round_))
            case DiagnoseMachines():
                self._diagnose(call, request)
            case ReplayOnGroup():
                self._replay(call, request)
            case MakeVersion():
                runs = request.running.model_copy(update={"code": request.request.code})
                after(costs.check_s, lambda: call.complete(VersionMade(runs=runs)))
            case CheckVersion():
                after(costs.check_s, lambda: call.complete(VersionChecked()))
            case LookAtMachines():
                after(costs.stop_s, lambda: call.complete(self._poll()))
            case ReadyStandbys():
                found = {machine.name: "" for machine in request.request.machines if machine.name not in self.silent}
                call.complete(ReadyResult(machines=found))
            case LeaseMachines(request=LeaseRequest() as wanted):
                self._ask_pool(call, "lease", wanted, Leased)
            case ReplaceMachines(request=ReplaceRequest() as wanted):
                self._ask_pool(call, "replace", wanted, Replaced)
            case GiveMachinesBack(request=GiveBack() as wanted):
                self._ask_pool(call, "give_back", wanted, int)
            case AwaitStandbys():
                self._await_standbys(call, request)
            case ReleaseMachines() | ProvisionMachines():
                call.complete(0)
            case RecordJob():
                call.complete(NumbersUsed())
            case WriteConclusion() | DeliverNotice():
                call.complete(None)
            case _:
                call.fail(f"the activity {request.name} is not simulated")

    def _stop(self, call: ActivityCall, request: StopRanks) -> None:
        generation = self.generation
        if generation is not None and not generation.stopped:
            self.farthest = max(self.farthest, self.completed())
            generation.frozen_ns = generation.frozen_ns or self.temporal.now_ns
            generation.stopped = True
        unheard = [machine.name for machine in request.job.machines if machine.name in self.silent]

        def answer() -> None:
            now_ns = self.temporal.now_ns
            silent = [machine.name for machine in request.job.machines if machine.name in self.silent]
            dying = generation.dying_until_ns if generation is not None else {}
            left = {rank: until for rank, until in dying.items() if until > now_ns and self.home(rank) not in silent}
            waited_s = (now_ns - call.started_ns) / S
            if left and waited_s < request.dying_s:
                wake_s = min(min(left.values()) / S - now_ns / S, request.dying_s - waited_s)
                self.temporal.at(max(wake_s, 0.1), answer)
                return
            call.complete(self._evidence(request, silent, sorted(left)))

        self.temporal.at(request.patience_s if unheard else self.case.costs.stop_s, answer)

    def _evidence(self, request: StopRanks, silent: list[str], dying: list[int]) -> Evidence:
        generation, now_ns = self.generation, self.temporal.now_ns
        if generation is None:
            return Evidence(generation=request.generation, unreachable=silent)
        if dying:
            texts = [f"rank {rank} on {self.home(rank)} is not gone since its kill" for rank in dying]
            return Evidence(generation=request.generation, unreachable=silent, dying=texts)
        completed, ran = self.completed(), set(self.names)
        now = [machine.name for machine in request.job.machines]
        exits, held = [], []
        for rank in range(self.world_size):
            machine = self.home(rank)
            if machine in silent or machine not in now:
                continue
            seen = generation.ends.get(rank)
            stopped = RankExit(
                rank=rank,
                machine=machine,
                signal=9,
                time_ns=now_ns,
                stopped_by_us=True,
                completed_steps=completed,
                shown_steps=max(completed - max(generation.resume_step, 0), 0),
            )
            exits.append(seen.end if seen else stopped)
        for rank in range(self.world_size):
            index = rank // self.case.job.ranks_per_machine
            own, peer = self.names[index], self.names[(index + 1) % len(self.names)]
            for machine, tier in ((own, Tier.OWN), (peer, Tier.BACKUP)):
                if machine in silent or machine not in now or completed < 1 or (tier is Tier.BACKUP and own == peer):
                    continue
                held.append(
                    StateCopy(
                        rank=rank,
                        machine=machine,
                        completed_steps=completed,
                        bytes=1,
                        tier=tier,
                        generation=generation.number,
                        saved_ns=now_ns,
                        run=request.job.run,
                    )
                )
        joined = [name for name in now if name not in ran]
        findings = [found for found in self.findings if found.machine in now and found.machine not in silent]
        return Evidence(
            generation=request.generation,
            exits=exits,
            held=held,
            unreachable=silent,
            emptied=[name for name in joined if name not in silent],
            findings=findings,
        )

    def _begin_launch(self, call: ActivityCall, request: LaunchRanks) -> None:
        silent = [machine.name for machine in request.job.machines if machine.name in self.silent]

        def launched() -> None:
            if silent:
                call.fail(f"{silent[0]} does not answer", "AgentUnreachable")
                return
            self._launch(request)
            now_ns = self.temporal.now_ns
            call.complete(
                Launched(
                    generation=request.generation,
                    resume_step=max(request.resume_step, 0),
                    started_ns=call.started_ns,
                    forked_ns=now_ns,
                )
            )

        self.temporal.at(request.patience_s if silent else self.case.costs.launch_s, launched)

    def _confirm(self, call: ActivityCall, request: ConfirmSteps) -> None:
        seen_ns = self.temporal.now_ns
        showing = request.showing if request.showing.kind else Showing(kind="steps")

        def look() -> None:
            now_ns, generation = self.temporal.now_ns, self.generation
            if call.done:
                self._watched.remove(look)
                return
            if generation is None or generation.number != request.launched.generation:
                return
            here = [name for name in self.names if name in self.silent]
            unheard = {name: (now_ns - max(self.silent_ns[name], seen_ns)) / S for name in here}
            given_up = {
                name: since for name, since in unheard.items() if request.silent_s and since >= request.silent_s
            }
            verdict = judge_confirmation(
                generation.number,
                self._states(),
                world_size=self.world_size,
                showing=showing,
                now_ns=now_ns,
                policy=request.job.spec.policy,
                silent=given_up if len(given_up) < len(self.names) else {},
                all_seen_ns=seen_ns,
                known_alive=request.known_alive,
            )
            if verdict is None and now_ns >= call.started_ns + request.timeout_s * S:
                verdict = judge_timeout(
                    generation.number,
                    self._states(),
                    world_size=self.world_size,
                    showing=showing,
                    bound_s=request.timeout_s,
                    now_ns=now_ns,
                )
            if verdict is not None:
                self._watched.remove(look)
                call.complete(verdict)

        self._watched.append(look)
        self.temporal.at(request.timeout_s, lambda: None if call.done else look())
        look()

    def _await_machines(self, call: ActivityCall, request: AwaitMachines) -> None:
        until_ns = self.temporal.now_ns + round(request.patience_s * S)

        def look() -> None:
            silent = [machine.name for machine in request.machines if machine.name in self.silent]
            if not silent or self.temporal.now_ns >= until_ns:
                call.complete(silent)
            elif not call.done:
                self.temporal.at(TICK_S, look)

        look()

    def _await_standbys(self, call: ActivityCall, request: AwaitStandbys) -> None:
        until_ns = self.temporal.now_ns + round(request.patience_s * S)

        def look() -> None:
            spare = self.temporal.workflow(POOL).state.spare
            if spare >= request.count or self.temporal.now_ns >= until_ns:
                call.complete(spare)
            elif not call.done:
                self.temporal.at(TICK_S, look)

        look()

    def _trace(self, call: ActivityCall, request: TraceRanks) -> None:
        found = HangResult(
            generation=request.generation, conclusion="nothing known", reason="the case has no samples of its ranks"
        )
        self.temporal.at(1.0, lambda: call.complete(found))

    def _diagnose(self, call: ActivityCall, request: DiagnoseMachines) -> None:
        names = [machine.name for machine in request.machines]
        alone = [test for test in request.tests if test not in BETWEEN_MACHINES]
        results = {
            name: [DiagnosticResult(test=test, findings=self._shown(name, test), kind="simulated") for test in alone]
            for name in names
            if name not in self.silent
        }
        pairs = [
            PairResult(
                test=test,
                machines=(one, other),
                passed=not (self._shown(one, test) or self._shown(other, test)),
                text="bytes do not arrive",
                kind="simulated",
            )
            for test in request.tests
            if test in BETWEEN_MACHINES
            for number, one in enumerate(names)
            for other in names[number + 1 :]
        ]
        silent = {name: "it does not answer" for name in names if name in self.silent}
        found = judge(results, pairs, silent)
        self.temporal.at(self.case.costs.tests_s, lambda: call.complete(found))

    def _shown(self, machine: str, test: str) -> list[Finding]:
        """Return what a test reports about a machine."""
        bad = [one for one in self.broken if one.machine == machine and test in one.fault.tests and one.strikes]
        return [
            Finding(
                inspection=test,
                source=FindingSource.TEST,
                reason=f"{test}-failed",
                text=f"{test} fails",
                owner=Owner.MACHINE,
                verdict=Health.FAULTY,
                sure=True,
            )
            for _ in bad[:1]
        ]

    def _replay(self, call: ActivityCall, request: ReplayOnGroup) -> None:
        names = [machine.name for machine in request.job.machines]
        bad = [one for one in self.broken if one.fault.in_replay and one.strikes and one.machine in names]
        run = GroupRun(
            group=request.group,
            machines=names,
            end=RunEnd.CRASHED if bad else RunEnd.RAN,
            repeat=request.repeat,
            why=f"rank 0 ended on {bad[0].machine}" if bad else "",
            steps=0 if bad else request.steps,
            losses=[] if bad else ["a"] * request.steps,
            states=[] if bad else ["s"],
            kind="simulated",
            seconds=self.case.costs.replay_s,
        )
        self.temporal.at(self.case.costs.replay_s, lambda: call.complete(run))

    def _poll(self) -> PollAnswers:
        state: JobState = self.temporal.workflow(job_workflow_id(JOB)).state
        running = RunningJob(
            job=JOB,
            run=state.run,
            machines=state.machines,
            launched=state.generation > 0,
            settled=state.status == "running",
        )
        pool: PoolState = self.temporal.workflow(POOL).state
        faults = {name: "it does not answer" for name in pool.machines if name in self.silent}
        for found in self.findings:
            if found.finding.verdict is Health.FAULTY:
                faults.setdefault(found.machine, f"{found.finding.reason}: {found.finding.headline}")
        left = [name for name, machine in pool.machines.items() if machine.uncleaned and name not in self.silent]
        return PollAnswers(
            machines=self.machines,
            standbys=self.case.job.standbys,
            jobs=[running],
            faults={name: why for name, why in faults.items() if name in pool.machines},
            cleaned=left,
        )

    def _ask_pool(self, call: ActivityCall, name: str, request: Any, kind: type) -> None:
        def answered(answer: Any) -> None:
            if isinstance(answer, UpdateRefusedError):
                call.fail(str(answer), "PoolUnknown")
            else:
                call.complete(answer)

        self.temporal.update(POOL, name, request, kind, answered)
