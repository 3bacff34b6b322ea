"""What workflows ask of the machines: each activity with its input, its bounds and its line in the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from activities import messages
    from activities.messages import (
        AlignInput,
        AwaitInput,
        CheckVersionInput,
        ClosedInput,
        ConfirmInput,
        DiagnoseInput,
        FindInput,
        FolderFound,
        FolderInput,
        LaunchInput,
        MakeVersionInput,
        PrepareInput,
        RanksAligned,
        ReleaseInput,
        ReplayGroupInput,
        RestoreInput,
        RoomInput,
        SlowRoundInput,
        StopInput,
        TraceInput,
        VersionChecked,
        VersionMade,
    )
    from everstep.base.text import listed
    from everstep.decisions.keep.choose_restore import Restore
    from everstep.model.diagnosis import Diagnosis
    from everstep.model.evidence import Evidence
    from everstep.model.hang import HangFound
    from everstep.model.incident import Left
    from everstep.model.job import JobSpec
    from everstep.model.launch import Confirmation, Launched, Showing
    from everstep.model.machine import Machine
    from everstep.model.replay import GroupRun
    from everstep.model.slow import SlowRound
    from everstep.model.state_copy import Restored
    from everstep.model.version import CodeVersion, UpdateRequest
    from workflows import web_ui
    from workflows.options import FAST_RETRY, HEARTBEAT_TIMEOUT, on_ranks

SLOWEST_RANK_BYTES = 500_000_000
"""Bytes a second of one rank that restores from its own slot: a slower one is given up."""
LONGEST_LOOK_S = 5.0
"""One look at ranks takes no longer."""
TRACE_ROOM_S = 4.0
"""Of the time that a trace has, for what comes beside its two looks, seconds."""
SLOW_ROOM = timedelta(seconds=20)
"""Beside its rounds' time a round of the vote has so long."""
MAKE_LIMIT = timedelta(minutes=10)
"""A snapshot that is not made, or not brought to the machines, within this time is given up."""
REPLAY_ROOM = timedelta(minutes=5)
"""Of a group's run, for what comes before and after its steps."""
DIAGNOSE_PARTS = 3
"""The tests of each machine, and each of two tests between machines, have ``diagnose.timeout_s`` in all."""
SLOWEST_BYTES = 20_000_000
"""Bytes a second of one machine: a restore that is slower is given up."""


def prepare(spec: JobSpec, machines: list[Machine], run: str, **bounds: Any) -> ActivityHandle[float]:
    """Start the fork servers; ``bounds`` may have ``patience_s``, ``probed`` and ``like`` of the input."""
    return workflow.start_activity(
        messages.PREPARE,
        PrepareInput(spec=spec, machines=machines, run=run, **bounds),
        result_type=float,
        summary=web_ui.summary(f"fork servers on {len(machines)} machines"),
        **on_ranks(timedelta(minutes=5)),
    )


def room(spec: JobSpec, machines: list[Machine]) -> ActivityHandle[str]:
    """Ask whether the checkpoints fit."""
    return workflow.start_activity(
        messages.ROOM,
        RoomInput(spec=spec, machines=machines),
        result_type=str,
        summary=web_ui.summary(f"for {spec.checkpoint.state_mb_per_rank:g} MB of state in each rank"),
        **on_ranks(timedelta(minutes=1)),
    )


def stop(
    spec: JobSpec, machines: list[Machine], run: str, generation: int, *, why: str = "", **bounds: Any
) -> ActivityHandle[Evidence]:
    """Stop all ranks; ``bounds`` are ``grace_s``, ``patience_s`` and ``probed`` of the input."""
    return workflow.start_activity(
        messages.STOP,
        StopInput(job=spec.name, generation=generation, machines=machines, spec=spec, run=run, **bounds),
        result_type=Evidence,
        summary=web_ui.summary(why or f"generation {generation} on {len(machines)} machines"),
        **on_ranks(timedelta(minutes=2)),
    )


def find(spec: JobSpec, machines: list[Machine], *, at: int | None = None) -> ActivityHandle[Evidence]:
    """Ask for all copies, on disks and remote storage too."""
    return workflow.start_activity(
        messages.FIND,
        FindInput(spec=spec, machines=machines, at=at),
        result_type=Evidence,
        summary=web_ui.summary("on disks and remote storage" if at is None else f"of step {at}"),
        **on_ranks(timedelta(seconds=120 + spec.policy.storage.answer_s)),
    )


def folder(machines: list[Machine], path: str) -> ActivityHandle[FolderFound]:
    """Look at the folder of one checkpoint."""
    return workflow.start_activity(
        messages.FOLDER,
        FolderInput(machines=machines, path=path),
        result_type=FolderFound,
        summary=web_ui.summary(path),
        **on_ranks(timedelta(minutes=2)),
    )


def restore(
    spec: JobSpec, machines: list[Machine], run: str, chosen: Restore, evidence: Evidence
) -> ActivityHandle[Restored]:
    """Bring the copies that a choice needs, and verify the own slots that were not verified yet."""
    copies = [*chosen.copies, *chosen.unverified]
    wanted = {copy.key for copy in copies}
    held = {copy.rank: copy for copy in evidence.held if copy.key in wanted}
    sizes = {rank: copy.bytes for rank, copy in held.items()}
    topology = spec.topology()
    largest = max(sum(sizes.get(rank, 0) for rank in topology.ranks(index)) for index in range(topology.machines))
    return workflow.start_activity(
        messages.RESTORE,
        RestoreInput(
            spec=spec,
            machines=machines,
            copies=copies,
            digests={rank: copy.digest for rank, copy in held.items() if copy.digest},
            bytes=sizes,
            disk_shared=evidence.disk_shared,
            run=run,
        ),
        result_type=Restored,
        summary=web_ui.summary(f"step {chosen.step}: {web_ui.wanted_text(chosen.copies, chosen.unverified)}"),
        **on_ranks(timedelta(seconds=180 + largest / SLOWEST_BYTES)),
    )


def launch(request: LaunchInput, origin: str) -> ActivityHandle[Launched]:
    """Start all ranks of a generation; ``origin`` says for people where they go on."""
    ranks = request.spec.topology().world_size
    return workflow.start_activity(
        messages.LAUNCH,
        request,
        result_type=Launched,
        summary=web_ui.summary(f"generation {request.generation}, {ranks} ranks, {origin}"),
        **on_ranks(timedelta(minutes=3)),
    )


def confirm(
    spec: JobSpec,
    machines: list[Machine],
    launched: Launched,
    *,
    bound_s: float,
    showing: Showing,
    known_alive: bool = False,
    state_bytes: int = 0,
    silent_s: float = 0.0,
) -> ActivityHandle[Confirmation]:
    """Wait until every rank completed a step.

    Args:
        spec: The job's.
        machines: Where it runs.
        launched: What is waited for.
        bound_s: How long, seconds.
        showing: How the script showed its steps before.
        known_alive: That all ranks live is known; it is their steps that are waited for.
        state_bytes: What the largest rank restores first, which takes more time.
        silent_s: A machine that says nothing for so long, while nobody steps, is not waited for; 0: it is.
    """
    restore_s = round(state_bytes / SLOWEST_RANK_BYTES, 1)
    request = ConfirmInput(
        spec=spec,
        machines=machines,
        launched=launched,
        restore_s=restore_s,
        timeout_s=bound_s,
        showing=showing,
        patient=known_alive,
        silent_s=silent_s,
    )
    what = "completes a step; all of them live" if known_alive else "completes a step"
    return workflow.start_activity(
        messages.CONFIRM,
        request,
        result_type=Confirmation,
        summary=web_ui.summary(f"generation {launched.generation}: every rank {what}"),
        **on_ranks(timedelta(seconds=bound_s + restore_s + 30)),
    )


def read_closed(incident: str) -> ActivityHandle[Left]:
    """Find out what an incident did that was closed from outside; tried until Temporal answers."""
    return workflow.start_activity(
        messages.CLOSED,
        ClosedInput(incident=incident),
        result_type=Left,
        summary=web_ui.summary(f"what {incident} had launched"),
        start_to_close_timeout=timedelta(minutes=2),
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=FAST_RETRY,
    )


def await_machines(machines: list[Machine], patience: timedelta) -> ActivityHandle[list[str]]:
    """Wait until machines answer."""
    bounds = on_ranks(patience + timedelta(minutes=1))
    return workflow.start_activity(
        messages.AWAIT,
        AwaitInput(machines=machines, patience_s=patience.total_seconds()),
        result_type=list[str],
        summary=web_ui.summary(listed([machine.name for machine in machines])),
        **bounds,
    )


def release(spec: JobSpec, machines: list[Machine], run: str) -> ActivityHandle[int]:
    """Give everything back."""
    return workflow.start_activity(
        messages.RELEASE,
        ReleaseInput(job=spec.name, machines=machines, run=run, dying_s=spec.policy.stop.kill_patience_s),
        result_type=int,
        summary="fork servers and shared memory",
        **on_ranks(timedelta(minutes=1, seconds=spec.policy.stop.kill_patience_s)),
    )


def make_version(
    spec: JobSpec, running: CodeVersion, request: UpdateRequest, number: int, needed: list[str]
) -> ActivityHandle[VersionMade]:
    """Make the version with this number that somebody asks for; the store keeps those that are ``needed``, by id."""
    what = request.code or request.git or "as it is, with other arguments or variables"
    return workflow.start_activity(
        messages.MAKE_VERSION,
        MakeVersionInput(spec=spec, running=running, request=request, needed=needed),
        result_type=VersionMade,
        summary=web_ui.summary(f"v{number} of {what}"),
        start_to_close_timeout=MAKE_LIMIT,
        schedule_to_close_timeout=2 * MAKE_LIMIT,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=FAST_RETRY,
    )


def check_version(spec: JobSpec, machines: list[Machine], run: str) -> ActivityHandle[VersionChecked]:
    """Bring a version to the machines and try it there; ``spec`` is the job as it is to run."""
    bound_s = spec.policy.update.check_s
    return workflow.start_activity(
        messages.CHECK_VERSION,
        CheckVersionInput(spec=spec, machines=machines, run=run, timeout_s=bound_s),
        result_type=VersionChecked,
        summary=web_ui.summary(f"v{spec.version} on {len(machines)} machines, up to where it joins the job"),
        **on_ranks(timedelta(seconds=bound_s) + MAKE_LIMIT),
    )


def trace(spec: JobSpec, machines: list[Machine], generation: int, incident: str) -> ActivityHandle[HangFound]:
    """Look at what the ranks do, twice; tried once or twice, and never for longer than the policy allows."""
    bound_s = spec.policy.hang.trace_s
    limit = timedelta(seconds=bound_s)
    given = TraceInput(
        spec=spec,
        machines=machines,
        generation=generation,
        incident=incident,
        look_s=min(LONGEST_LOOK_S, max((bound_s - TRACE_ROOM_S) / 2, 0.5)),
    )
    return workflow.start_activity(
        messages.TRACE,
        given,
        result_type=HangFound,
        summary=web_ui.summary(f"generation {generation}: what its ranks do, on {len(machines)} machines"),
        start_to_close_timeout=limit,
        schedule_to_close_timeout=limit,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=FAST_RETRY,
    )


def slow_round(
    spec: JobSpec, machines: list[Machine], generation: int, incident: str, number: int
) -> ActivityHandle[SlowRound]:
    """One round of the vote for a slow machine; tried again while a worker dies, for three rounds' time at most."""
    policy = spec.policy
    given = SlowRoundInput(
        spec=spec,
        machines=machines,
        generation=generation,
        incident=incident,
        number=number,
        round_s=policy.slow.round_s,
    )
    limit = timedelta(seconds=3 * policy.slow.round_s) + SLOW_ROOM
    return workflow.start_activity(
        messages.SLOW_ROUND,
        given,
        result_type=SlowRound,
        summary=web_ui.summary(f"round {number} of {policy.slow.rounds}: which machine the others wait for"),
        start_to_close_timeout=limit,
        schedule_to_close_timeout=limit,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=FAST_RETRY,
    )


def align(
    spec: JobSpec, machines: list[Machine], generation: int, *, backed_up: Sequence[int] = ()
) -> ActivityHandle[RanksAligned]:
    """Have all ranks come to the end of the same step, and wait there; of some the backup has to have it as well."""
    bound_s = spec.policy.stop.align_s
    return workflow.start_activity(
        messages.ALIGN,
        AlignInput(spec=spec, machines=machines, generation=generation, patience_s=bound_s, backed_up=list(backed_up)),
        result_type=RanksAligned,
        summary=web_ui.summary(f"generation {generation}: every rank ends the same step"),
        **on_ranks(timedelta(seconds=bound_s + 15)),
    )


def diagnose(spec: JobSpec, machines: list[Machine], run: str, tests: Sequence[str]) -> ActivityHandle[Diagnosis]:
    """Test the machines of a stopped job, with the settings of its policy."""
    policy = spec.policy
    request = DiagnoseInput(
        machines=machines,
        tests=list(tests),
        job=spec.name,
        run=run,
        settings=policy.diagnose.settings,
        limit_s=policy.diagnose.timeout_s,
        patience_s=policy.silence.evict_s,
        slow_share=policy.diagnose.slow_share,
    )
    return workflow.start_activity(
        messages.DIAGNOSE,
        request,
        result_type=Diagnosis,
        summary=web_ui.summary(f"{listed(list(tests), 4)} on {len(machines)} machines"),
        **on_ranks(timedelta(seconds=policy.diagnose.timeout_s * DIAGNOSE_PARTS)),
    )


def replay_group(request: ReplayGroupInput) -> ActivityHandle[GroupRun]:
    """Run a job's script on one group of its machines."""
    names = listed([machine.name for machine in request.machines], 4)
    again = f", run {request.repeat}" if request.repeat > 1 else ""
    return workflow.start_activity(
        messages.REPLAY_GROUP,
        request,
        result_type=GroupRun,
        summary=web_ui.summary(f"{request.group}{again}: {names}, {request.spec.topology().text}"),
        **on_ranks(timedelta(seconds=request.start_s + request.limit_s) + REPLAY_ROOM),
    )
