"""How the machines of a case answer the activities of workflows."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from activities.pool.ready_standbys import ReadyStandbys
from activities.pool.requests import AwaitStandbys, GiveMachinesBack, LeaseMachines, ReplaceMachines
from activities.write_to_ledger import RecordJob, WriteConclusion
from drills.cases.temporal import TASK_QUEUE, ActivityCall, S, UpdateRefusedError
from drills.cases.traced import trace
from drills.cases.world import JOB, TICK_S, World
from everstep.decisions.act.evict.shared import alike_machines, kept_findings
from everstep.decisions.act.recover.confirm import RankState, judge_confirmation, judge_timeout
from everstep.decisions.blame.diagnose.diagnosis import judge
from everstep.decisions.blame.hang.analysis import found_of
from everstep.model.diagnosis import BETWEEN_MACHINES, DiagnosticResult, PairResult
from everstep.model.evidence import Evidence, RankExit
from everstep.model.finding import Finding, FindingSource, Health, Owner
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.launch import Confirmation, Launched, Showing
from everstep.model.machine import Machine
from everstep.model.places import NOWHERE, Places
from everstep.model.pool import Leased, PollAnswers, PoolState, ReadyResult, Replaced, RunningJob, pool_workflow_id
from everstep.model.ranks import text_of
from everstep.model.replay import GroupRun, RunEnd
from everstep.model.slow import SlowRound
from everstep.model.state_copy import Restored, StateCopies, Tier, count_of

POOL = pool_workflow_id(TASK_QUEUE)
KIND = "simulated"
"""The kind of hardware of all machines: their results can be compared."""
UNREACHABLE = "AgentUnreachable"
"""The type of the error of a machine that does not answer."""


class Answers:
    """Answers activities. ``world`` is set later, since the world itself needs these answers."""

    world: World

    def __init__(self) -> None:
        self.performed: list[Activity[Any]] = []
        """Every activity that was begun, in order."""
        self._of: dict[type[Activity[Any]], Callable[[ActivityCall, Any], None]] = {
            PrepareMachines: self._prepare,
            StopRanks: self._stop,
            LaunchRanks: self._launch,
            ConfirmSteps: self._confirm,
            AlignRanks: self._align,
            AwaitMachines: self._await_machines,
            FindCheckpoints: self._find_checkpoints,
            RestoreCheckpoints: self._restore,
            TraceRanks: self._trace,
            VoteRound: self._vote,
            DiagnoseMachines: self._diagnose,
            ReplayOnGroup: self._replay,
            MakeVersion: self._make_version,
            LookAtMachines: self._look_at_machines,
            ReadyStandbys: self._ready,
            LeaseMachines: lambda call, wanted: self._ask_pool(call, "lease", wanted.request, Leased),
            ReplaceMachines: lambda call, wanted: self._ask_pool(call, "replace", wanted.request, Replaced),
            GiveMachinesBack: lambda call, wanted: self._ask_pool(call, "give_back", wanted.request, int),
            AwaitStandbys: self._await_standbys,
            CheckVersion: lambda call, _: self._later(call, self.world.case.costs.check_s, VersionChecked()),
            CheckRoom: lambda call, _: call.complete(""),
            ReleaseMachines: lambda call, _: call.complete(0),
            RecordJob: lambda call, _: call.complete(NumbersUsed()),
            WriteConclusion: lambda call, _: call.complete(None),
            DeliverNotice: lambda call, _: call.complete(None),
        }

    def __call__(self, call: ActivityCall) -> None:
        """Begin an activity."""
        self.performed.append(call.request)
        if (answer := self._of.get(type(call.request))) is None:
            call.fail(f"the activity {call.request.name!r} is not simulated")
        else:
            answer(call, call.request)

    def _later(self, call: ActivityCall, after_s: float, result: Any) -> None:
        self.world.temporal.at(after_s, lambda: call.complete(result))

    def _silent(self, machines: list[Machine]) -> list[str]:
        return [machine.name for machine in machines if self.world.is_silent(machine.name)]

    # The ranks.

    def _prepare(self, call: ActivityCall, request: PrepareMachines) -> None:
        at, silent = self.world.temporal.at, self._silent(request.job.machines)
        names = {machine.name for machine in request.job.machines}
        unfit = [broken.machine for broken in self.world.broken if broken.fault.unfit and broken.machine in names]
        if silent:
            at(request.patience_s, lambda: call.fail(f"{silent[0]} does not answer", UNREACHABLE))
        elif unfit:
            at(self.world.case.costs.launch_s, lambda: call.fail(f"{unfit[0]}: its libraries cannot be imported"))
        else:
            self._later(call, self.world.case.costs.launch_s, 1.0)

    def _launch(self, call: ActivityCall, request: LaunchRanks) -> None:
        world, silent = self.world, self._silent(request.job.machines)

        def launched() -> None:
            if silent:
                call.fail(f"{silent[0]} does not answer", UNREACHABLE)
            elif not call.done:
                world.launch(
                    request.generation, request.resume_step, list(request.job.machines), request.job.spec.version
                )
                step, now_ns = max(request.resume_step, 0), world.temporal.now_ns
                call.complete(
                    Launched(
                        generation=request.generation, resume_step=step, started_ns=call.started_ns, forked_ns=now_ns
                    )
                )

        world.temporal.at(request.patience_s if silent else world.case.costs.launch_s, launched)

    def _confirm(self, call: ActivityCall, request: ConfirmSteps) -> None:
        world, since_ns = self.world, self.world.temporal.now_ns
        showing = request.showing if request.showing.kind else Showing(kind="steps")

        def look() -> None:
            if call.done:
                world.observers.remove(look)
                return
            generation = world.generation
            if generation is not None and generation.number == request.launched.generation:
                verdict = self._judged(request, showing, since_ns)
                if verdict is not None:
                    world.observers.remove(look)
                    call.complete(verdict)

        world.observers.append(look)
        world.temporal.at(request.timeout_s, lambda: None if call.done else look())
        look()

    def _judged(self, request: ConfirmSteps, showing: Showing, since_ns: int) -> Confirmation | None:
        world, now_ns, generation = self.world, self.world.temporal.now_ns, self.world.generation
        assert generation is not None
        unheard = {
            name: (now_ns - max(world.silent_ns[name], since_ns)) / S
            for name in generation.names
            if world.is_silent(name)
        }
        given_up = {name: for_s for name, for_s in unheard.items() if request.silent_s and for_s >= request.silent_s}
        ranks = self._states()
        verdict = judge_confirmation(
            generation.number,
            ranks,
            world_size=world.world_size,
            showing=showing,
            now_ns=now_ns,
            policy=request.job.spec.policy,
            silent=given_up if len(given_up) < len(generation.names) else {},
            all_seen_ns=since_ns,
            known_alive=request.known_alive,
        )
        if verdict is None and now_ns >= since_ns + round(request.timeout_s * S):
            return judge_timeout(
                generation.number,
                ranks,
                world_size=world.world_size,
                showing=showing,
                bound_s=request.timeout_s,
                now_ns=now_ns,
            )
        return verdict

    def _states(self) -> list[RankState]:
        """Return the states of the ranks, as their agents report them."""
        world, generation = self.world, self.world.generation
        assert generation is not None
        begun_ns = generation.loop_ns if world.temporal.now_ns >= generation.loop_ns else 0
        first_ns = generation.loop_ns + round(world.case.job.step_s * S) if world.stepped() else 0
        return [
            RankState(
                rank=rank,
                alive=rank not in generation.ends,
                attached=begun_ns > 0,
                finished=False,
                completed_steps=world.completed(),
                optimizer_steps=0,
                code=generation.ends[rank].end.code if rank in generation.ends else None,
                forked_ns=generation.launched_ns,
                joined_ns=begun_ns,
                entered_ns=begun_ns,
                restored_ns=begun_ns,
                first_step_ns=first_ns,
            )
            for rank in range(world.world_size)
            if not world.is_silent(world.home(rank))
        ]

    def _align(self, call: ActivityCall, request: AlignRanks) -> None:
        world = self.world
        world.temporal.at(world.case.job.step_s, lambda: call.complete(RanksAligned(step=world.completed())))

    def _trace(self, call: ActivityCall, request: TraceRanks) -> None:
        world, generation = self.world, self.world.generation
        if generation is None:
            call.fail("there are no ranks")
            return
        verdict = trace(world, generation, is_hung=True).verdict
        topology = world.spec.topology()
        found = found_of(
            verdict,
            topology,
            generation.names,
            generation=request.generation,
            looks=2,
            seconds=world.case.costs.trace_s,
        )
        self._later(call, world.case.costs.trace_s, found)

    def _vote(self, call: ActivityCall, request: VoteRound) -> None:
        even = SlowRound(number=request.number, looks=10, job="none", job_why="no rank computes longer than the others")
        self._later(call, request.round_s, even)

    # The stop, and the evidence.

    def _stop(self, call: ActivityCall, request: StopRanks) -> None:
        world = self.world
        world.stop()
        generation = world.generation

        asked = {machine.name for machine in request.job.machines}

        def answer() -> None:
            now_ns, silent = world.temporal.now_ns, self._silent(request.job.machines)
            dying = generation.dying_until_ns if generation is not None else {}
            left = {
                rank: until_ns
                for rank, until_ns in dying.items()
                if until_ns > now_ns and world.home(rank) in asked and world.home(rank) not in silent
            }
            left_s = request.dying_s - (now_ns - call.started_ns) / S
            if left and left_s > 0:
                world.temporal.at(min((min(left.values()) - now_ns) / S, left_s) + 0.1, answer)
            elif not call.done:
                call.complete(self._evidence(request, silent, sorted(left)))

        unheard = self._silent(request.job.machines)
        world.temporal.at(request.patience_s if unheard else world.case.costs.stop_s, answer)

    def _evidence(self, request: StopRanks, silent: list[str], dying: list[int]) -> Evidence:
        world, generation = self.world, self.world.generation
        names = [machine.name for machine in request.job.machines]
        known = Evidence(generation=request.generation, machines=names, unreachable=silent, cut_off=world.cut_off)
        if generation is None:
            return known
        here = {machine.name for machine in request.job.machines} - set(silent)
        left = {world.home(rank): f"rank {rank} is not gone after SIGKILL" for rank in dying}
        answering = here - left.keys()
        findings = [found for found in world.findings if found.machine in here]
        return known.model_copy(
            update={
                "dying": {machine: text for machine, text in left.items() if machine in here},
                "exits": [self._exit(rank) for rank in range(world.world_size) if world.home(rank) in answering],
                "held": self._copies(request.job.run, answering),
                "emptied": sorted(answering - set(generation.names)),
                "findings": kept_findings(findings, alike_machines(findings), len(names)),
                "alike": alike_machines(findings),
            }
        )

    def _exit(self, rank: int) -> RankExit:
        world, generation = self.world, self.world.generation
        assert generation is not None
        if rank in generation.ends:
            return generation.ends[rank].end
        return RankExit(
            rank=rank,
            machine=world.home(rank),
            signal=9,
            time_ns=world.temporal.now_ns,
            stopped_by_us=True,
            completed_steps=world.completed(),
            shown_steps=world.stepped(),
        )

    def _copies(self, run: str, answering: Collection[str]) -> list[StateCopies]:
        """Return the copies of the newest step: in each rank's own memory, and in that of the next machine."""
        world, generation = self.world, self.world.generation
        assert generation is not None
        names, step = generation.names, world.completed()
        if step < 1:
            return []
        places: dict[Tier, dict[str, str]] = {Tier.OWN: {}, Tier.BACKUP: {}}
        for machine, ranks in world.spec.assignment(names).each():
            after = names[(names.index(machine) + 1) % len(names)]
            for tier, at in ((Tier.OWN, machine), (Tier.BACKUP, after)):
                if at in answering and (tier is Tier.OWN or at != machine):
                    places[tier][at] = text_of(ranks)
        found = StateCopies(
            places=NOWHERE,
            completed_steps=step,
            bytes=1,
            generation=generation.number,
            saved_ns=generation.frozen_ns,
            run=run,
        )
        return [found.changed(tier=tier, places=Places(of_tier)) for tier, of_tier in places.items() if of_tier]

    def _find_checkpoints(self, call: ActivityCall, request: FindCheckpoints) -> None:
        silent = self._silent(request.job.machines)
        found = Evidence(generation=0, searched=True, unreachable=silent)
        self._later(call, self.world.case.costs.stop_s, found)

    def _restore(self, call: ActivityCall, request: RestoreCheckpoints) -> None:
        seconds = self.world.case.costs.restore_s
        self._later(call, seconds, Restored(moved=request.copies, bytes=count_of(request.copies), seconds=seconds))

    # Tests and replays.

    def _diagnose(self, call: ActivityCall, request: DiagnoseMachines) -> None:
        names = [machine.name for machine in request.machines if not self.world.is_silent(machine.name)]
        silent = dict.fromkeys(self._silent(request.machines), "it does not answer")
        results = {
            name: [
                DiagnosticResult(test=test, findings=self._shown(name, test), kind=KIND)
                for test in request.tests
                if test not in BETWEEN_MACHINES
            ]
            for name in names
        }
        pairs = [
            PairResult(
                test=test,
                machines=(one, other),
                passed=not (self._shown(one, test) or self._shown(other, test)),
                text="bytes do not arrive",
                kind=KIND,
            )
            for test in request.tests
            if test in BETWEEN_MACHINES
            for number, one in enumerate(names)
            for other in names[number + 1 :]
        ]
        self._later(call, self.world.case.costs.tests_s, judge(results, pairs, silent))

    def _shown(self, machine: str, test: str) -> list[Finding]:
        """Return what a test reports about a machine."""
        if not any(one.machine == machine and one.strikes and test in one.fault.tests for one in self.world.broken):
            return []
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
        ]

    def _replay(self, call: ActivityCall, request: ReplayOnGroup) -> None:
        names = [machine.name for machine in request.job.machines]
        shown = [one for one in self.world.broken if one.fault.in_replay and one.strikes and one.machine in names]
        ran = {"losses": ["a"] * request.steps, "states": ["s"], "steps": request.steps}
        crashed = {"why": f"a rank on {shown[0].machine} ended"} if shown else {}
        run = GroupRun.model_validate(
            {
                "group": request.group,
                "machines": names,
                "end": RunEnd.CRASHED if shown else RunEnd.RAN,
                "repeat": request.repeat,
                "kind": KIND,
                "seconds": self.world.case.costs.replay_s,
            }
            | (crashed or ran)
        )
        self._later(call, self.world.case.costs.replay_s, run)

    # Versions of the code.

    def _make_version(self, call: ActivityCall, request: MakeVersion) -> None:
        runs = request.request.made or request.running.model_copy(update={"code": request.request.code})
        self._later(call, self.world.case.costs.check_s, VersionMade(runs=runs))

    # The pool of machines.

    def _look_at_machines(self, call: ActivityCall, request: LookAtMachines) -> None:
        self.world.temporal.at(self.world.case.costs.stop_s, lambda: call.complete(self._poll()))

    def _poll(self) -> PollAnswers:
        world = self.world
        state: JobState = world.temporal.workflow(job_workflow_id(JOB)).state
        pool: PoolState = world.temporal.workflow(POOL).state
        running = RunningJob(
            job=JOB,
            run=state.run,
            machines=state.machines,
            launched=state.generation > 0,
            settled=state.status == "running",
        )
        faults = {
            found.machine: f"{found.finding.reason}: {found.finding.headline}"
            for found in world.findings
            if found.finding.verdict is Health.FAULTY
        } | dict.fromkeys(world.silent_ns, "it does not answer")
        return PollAnswers(
            machines=world.machines,
            standbys=world.case.job.standbys,
            jobs=[running],
            faults={name: why for name, why in faults.items() if name in pool.machines},
            cleaned=[name for name, one in pool.machines.items() if one.uncleaned and not world.is_silent(name)],
        )

    def _ready(self, call: ActivityCall, request: ReadyStandbys) -> None:
        machines = [one.name for one in request.request.machines if not self.world.is_silent(one.name)]
        call.complete(ReadyResult(machines=dict.fromkeys(machines, "")))

    def _ask_pool(self, call: ActivityCall, name: str, wanted: Any, kind: type) -> None:
        def answered(answer: Any) -> None:
            if isinstance(answer, UpdateRefusedError):
                call.fail(str(answer), "PoolUnknown")
            else:
                call.complete(answer)

        self.world.temporal.update(POOL, name, wanted, kind, answered)

    # Waits.

    def _await_machines(self, call: ActivityCall, request: AwaitMachines) -> None:
        self._await(call, request.patience_s, lambda: not self._silent(request.machines))

    def _await_standbys(self, call: ActivityCall, request: AwaitStandbys) -> None:
        pool = self.world.temporal.workflow(POOL)
        self._await(call, request.patience_s, lambda: pool.state.spare >= request.count)

    def _await(self, call: ActivityCall, patience_s: float, is_over: Callable[[], bool]) -> None:
        """Ask again and again until the wait is over; the activity fails if that takes too long."""
        temporal = self.world.temporal
        until_ns = temporal.now_ns + round(patience_s * S)

        def look() -> None:
            if is_over():
                call.complete(None)
            elif temporal.now_ns >= until_ns:
                call.fail("it was not over in time")
            elif not call.done:
                temporal.at(TICK_S, look)

        look()
