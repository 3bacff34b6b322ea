"""Every number that decides how a job is recovered, with its source.

A number from a paper names its section; the papers leave the others open.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from everstep.model.eviction import EvictMode
from everstep.model.ladder import Rung, RungMode


class RecoveryPolicy(BaseModel):
    """How often, how fast and how patiently a job is brought back."""

    model_config = ConfigDict(frozen=True, extra="allow")

    max_attempts: int = Field(
        3, ge=1, description="Reattempts of one incident, or restores in a row that fail, before it is parked."
    )
    max_failures_at_step: int = Field(
        3, ge=1, description="Failures of the job at one and the same step before it is parked."
    )
    max_failures_without_progress: int = Field(
        5, ge=1, description="Failures in a row, each before steady progress, before the job is parked."
    )
    max_lost_steps: int = Field(
        1000, ge=0, description="Without a common checkpoint the job begins again only if it loses no more."
    )
    steady_steps: int = Field(
        100,
        ge=1,
        description="A failure is solved, and a version of the code steady, so many steps past it without another, and "
        "after steady_s.",
    )
    steady_s: float = Field(
        3600.0,
        ge=0,
        description="So long after the job stepped again, seconds; alone where a script shows no steps.",
    )
    backoff_initial_s: float = Field(
        1.0, ge=0, description="Wait before the second reattempt, seconds; the first one does not wait."
    )
    backoff_factor: float = Field(2.0, ge=1, description="Growth of the wait from one reattempt to the next.")
    backoff_max_s: float = Field(60.0, ge=0, description="Longest wait between reattempts, seconds.")
    storage_answer_s: float = Field(
        45.0, gt=0, description="Storage that does not list its copies within this does not answer, seconds."
    )
    storage_tries: int = Field(
        5, ge=1, description="How often silent storage that may hold a newer step is asked before parking."
    )
    storage_wait_initial_s: float = Field(5.0, ge=0, description="Wait before it is asked again, seconds.")
    storage_wait_factor: float = Field(2.0, ge=1, description="Growth of that wait from one time to the next.")
    storage_wait_max_s: float = Field(60.0, ge=0, description="Longest such wait, seconds.")
    confirm_timeout_s: float = Field(
        600.0, gt=0, description="All ranks have at least this long to complete a step after a launch, seconds."
    )
    confirm_factor: float = Field(
        3.0, ge=1, description="A restart may take this many times as long to its first step as one did before."
    )
    start_timeout_s: float = Field(
        1800.0, gt=0, description="Within it a job must complete its first step, as long as none was seen, s."
    )
    confirm_alive_s: float = Field(
        10.0, gt=0, description="A script that shows no steps is taken to run when it lived that long, seconds."
    )
    stall_factor: float = Field(
        10.0, gt=1, description="Job-wide stall after this many median step times without any step."
    )
    stall_floor_s: float = Field(
        600.0, gt=0, description="A stall is at least this long, seconds (hang threshold of ByteRobust, section 4.1)."
    )
    stall_ceiling_s: float = Field(
        3600.0,
        gt=0,
        description="A job whose ranks are seen to compute is not stalled before this, and the bound of a stall is "
        "not learnt to be longer, seconds.",
    )
    hang_floor_s: float = Field(
        3.0,
        gt=0,
        description="All ranks wait for some that do nothing: a hang after at least so long without a step, s.",
    )
    hang_factor: float = Field(10.0, gt=1, description="And after so many median step times.")
    stopped_s: float = Field(
        0.5, gt=0, description="A rank whose process is stopped so long while no rank steps is a hang, seconds."
    )
    trace_s: float = Field(
        20.0,
        ge=0,
        description="Ranks of a job that stands still are looked at, for no longer than this before they are stopped, "
        "seconds; 0: never.",
    )
    slow_s: float = Field(
        120.0,
        ge=0,
        description="Most ranks step so long more slowly than before: the slow machine is looked for, seconds; "
        "0: never.",
    )
    slow_rounds: int = Field(
        5, ge=3, le=20, description="Rounds of the vote for the slow machine (ByteRobust, section 5.1)."
    )
    slow_round_s: float = Field(
        10.0, gt=0, le=600, description="Length of such a round, seconds (ByteRobust, section 5.1)."
    )
    slow_again_s: float = Field(
        3600.0, ge=0, description="After a vote there is none again for so long, whatever it said, seconds."
    )
    nan_loss_steps: int = Field(
        1, ge=0, description="A loss that is not finite for this many steps in a row is a fault; 0: never."
    )
    nan_grad_norm_steps: int = Field(
        3, ge=0, description="The same of the gradient norm, of which a GradScaler skips some; 0: never."
    )
    agent_retry_max_s: float = Field(
        3.0, gt=0, description="Longest wait of a watcher before it asks a silent agent again, seconds."
    )
    exit_grace_s: float = Field(
        60.0, ge=0, description="After a rank left with code 0 the others have this long to follow, seconds."
    )
    stop_grace_s: float = Field(
        5.0, ge=0, description="Between SIGTERM and SIGKILL when an operator stops a job, seconds."
    )
    kill_patience_s: float = Field(
        600.0,
        ge=0,
        description="Ranks that were killed have this long to be gone before the job is parked, seconds: the kernel "
        "frees some GB of memory a second.",
    )
    parked_timeout_h: float = Field(
        24.0 * 7, gt=0, description="A parked job is abandoned after this long without an operator, hours."
    )
    rollback_steps: int = Field(
        20, ge=0, description="A version of the code that fails before so many steps is rolled back."
    )
    rollback_s: float = Field(300.0, ge=0, description="So is one that fails before it has run for so long, seconds.")
    rollback_error_h: float = Field(
        24.0,
        ge=0,
        description="A version that came within so many hours is taken back at the program's first own error.",
    )
    ladder: dict[Rung, RungMode] = Field(
        default_factory=dict,
        description="How far diagnose, rollback and replay may go: act, approve, shadow or off.",
    )
    ladder_window_h: float = Field(
        24.0,
        ge=0,
        description="What was tried for the same fault within so many hours is not tried again, solved or not.",
    )
    ladder_repeats: int = Field(
        3,
        ge=0,
        description="So many failures of unknown cause with one symptom in ladder_window_h are one fault, whatever "
        "machines they name; 0: never.",
    )
    ladder_restarts: int = Field(
        5,
        ge=0,
        description="A fault that all rungs left unsolved, and that was restarted so often in ladder_window_h since, "
        "is parked; 0: never.",
    )
    diagnose_at_once: bool = Field(
        default=False,
        description="Test the machines before the first restart too, where nothing says what failed.",
    )
    diagnose_s: float = Field(
        2000.0, gt=0, description="All tests of one machine, and each between two, have this long, seconds."
    )
    diagnose_slow_share: float = Field(
        0.2, ge=0, lt=1, description="A bandwidth below this share of the machines' median is a fault."
    )
    diagnose_off: list[str] = Field(default_factory=list, description="Tests that are never run.")
    diagnose_settings: dict[str, dict[str, JsonValue]] = Field(
        default_factory=dict, description="Settings of tests, by their names."
    )
    replay_steps: int = Field(10, ge=1, description="A replay runs so many steps of the script.")
    replay_s: float = Field(
        300.0,
        gt=0,
        description="From its first step on a group has so long for them; after it the group hangs, seconds.",
    )
    replay_machines: int = Field(
        0,
        ge=0,
        description="Machines of a group; 0: as many as name one machine at fault alone (m ≤ n of ByteRobust, section "
        "6).",
    )
    replay_shows: float = Field(
        0.5, gt=0, le=1, description="A fault shows in this share of the runs in which its machine takes part."
    )
    replay_miss: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Both phases are repeated until such a fault is missed with this probability at most.",
    )
    replay_args: list[str] = Field(
        default_factory=list,
        description="Further arguments of the script in a replay, e.g. for fewer layers (ByteRobust, section 6).",
    )
    hold_s: float = Field(
        30.0,
        ge=0,
        description="Before an urgent update, or a machine is exchanged while they step, ranks have so long to end the "
        "same step, seconds.",
    )
    check_s: float = Field(
        600.0, gt=0, description="A version has so long to come to where it joins the job when it is tried, s."
    )
    evict_mode: EvictMode = Field(
        EvictMode.ACT, description="Most that a rule of eviction may do: act, approve, shadow or off."
    )
    evict_rules: dict[str, EvictMode] = Field(
        default_factory=dict, description="The same of single rules: a table of names and modes."
    )
    evict_share: float = Field(
        0.25, ge=0, le=1, description="Share of the machines evicted in the window without an operator."
    )
    evict_at_least: int = Field(2, ge=0, description="So many may be evicted in the window however small the share is.")
    evict_window_h: float = Field(24.0, gt=0, description="The window in which evictions are counted, hours.")
    silent_evict_s: float = Field(
        2.0, ge=0, description="Once a job failed, a machine that does not answer for so long is gone, seconds."
    )
    silent_s: float = Field(
        10.0, gt=0, description="Where nothing failed, agent and ranks are silent for so long: an anomaly, s."
    )
