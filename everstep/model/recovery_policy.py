"""Defines every setting that decides how a job is recovered, in groups, with the source of its default.

Each group is a table of a job file, e.g. ``[policy.hang]``. The name of a setting begins with the name of its group, as
in ``hang.floor_s``. A default that comes from the paper on ByteRobust names the section; the paper does not specify the
other defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.fields import FieldInfo

from everstep.model.eviction import EvictMode
from everstep.model.ladder import Rung, RungMode


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class RetryPolicy(_Group):
    """How often a job is restarted before it is parked, and how long each restart waits."""

    max_attempts: int = Field(
        3, ge=1, description="Reattempts of one incident, or restores in a row that fail, before the job is parked."
    )
    max_failures_at_step: int = Field(
        3, ge=1, description="Failures of the job at one and the same step before it is parked."
    )
    max_failures_without_progress: int = Field(
        5, ge=1, description="Failures in a row, each before steady progress, before the job is parked."
    )
    max_lost_steps: int = Field(
        1000,
        ge=0,
        description="A job whose ranks have no common checkpoint begins from nothing only if it loses at most this "
        "many steps.",
    )
    service_h: float = Field(
        1.0,
        ge=0,
        description="While storage, or another service that all machines share, fails, the job is launched again for "
        "this long before it is parked, hours.",
    )
    backoff_initial_s: float = Field(
        1.0, ge=0, description="Wait before the second reattempt, seconds; the first one does not wait."
    )
    backoff_factor: float = Field(2.0, ge=1, description="Growth of the wait from one reattempt to the next.")
    backoff_max_s: float = Field(60.0, ge=0, description="Longest wait between reattempts, seconds.")


class ProgressPolicy(_Group):
    """What counts as steady progress: a failure is solved then, and a version of the code is steady."""

    steady_steps: int = Field(
        100, ge=1, description="Steps beyond the failure, without another failure; steady_s must have passed as well."
    )
    steady_s: float = Field(
        3600.0,
        ge=0,
        description="Time since the job stepped again, seconds; it counts alone where a script shows no steps.",
    )


class StoragePolicy(_Group):
    """How patiently storage is asked for its copies."""

    answer_s: float = Field(
        45.0, gt=0, description="Storage that does not list its copies within this time does not answer, seconds."
    )
    tries: int = Field(
        5, ge=1, description="How often silent storage that may hold a newer step is asked before the job is parked."
    )
    wait_initial_s: float = Field(5.0, ge=0, description="Wait before storage is asked again, seconds.")
    wait_factor: float = Field(2.0, ge=1, description="Growth of that wait from one try to the next.")
    wait_max_s: float = Field(60.0, ge=0, description="Longest such wait, seconds.")


class ConfirmPolicy(_Group):
    """How long a launch may take until its ranks complete a step."""

    timeout_s: float = Field(
        600.0, gt=0, description="All ranks have at least this long to complete a step after a launch, seconds."
    )
    factor: float = Field(
        3.0, ge=1, description="A restart may take this many times as long to its first step as an earlier start did."
    )
    start_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="A job must complete its first step within this time, as long as no start of it did, seconds.",
    )
    alive_s: float = Field(
        10.0, gt=0, description="A script that shows no steps is taken to run once it has lived this long, seconds."
    )


class HangPolicy(_Group):
    """When a job without steps is a hang."""

    floor_s: float = Field(
        600.0,
        gt=0,
        description="A job without steps hangs after at least this long, seconds, if the ranks that others wait for "
        "are working or unknown (hang threshold of ByteRobust, section 4.1).",
    )
    factor: float = Field(10.0, gt=1, description="Such a hang also lasts at least this many median step times.")
    ceiling_s: float = Field(
        3600.0,
        gt=0,
        description="A job whose ranks are seen to compute does not hang before this time, seconds; bounds that are "
        "learnt from its steps are not longer either.",
    )
    idle_floor_s: float = Field(
        3.0,
        gt=0,
        description="A job without steps hangs after at least this long, seconds, if all ranks wait for ranks that do "
        "nothing.",
    )
    idle_factor: float = Field(10.0, gt=1, description="Such a hang also lasts at least this many median step times.")
    stopped_s: float = Field(
        0.5,
        gt=0,
        description="A job without steps hangs if the process of a rank is stopped for this long, seconds, and for a "
        "median step time.",
    )
    trace_s: float = Field(
        20.0,
        ge=0,
        description="Ranks of a job that hangs are traced for at most this long before they are stopped, seconds; "
        "0: never.",
    )


class SlowPolicy(_Group):
    """When a job is slower than before, and the vote for the slow machine."""

    after_s: float = Field(
        120.0,
        ge=0,
        description="The vote begins when most ranks have stepped more slowly than before for this long, seconds; 0: "
        "never.",
    )
    rounds: int = Field(
        5, ge=3, le=20, description="Rounds of the vote for the slow machine (ByteRobust, section 5.1)."
    )
    round_s: float = Field(10.0, gt=0, le=600, description="Length of such a round, seconds (ByteRobust, section 5.1).")
    again_after_s: float = Field(
        3600.0, ge=0, description="Time from a vote to the next one, whatever its result, seconds."
    )


class NanPolicy(_Group):
    """When numbers that are not finite are a fault."""

    loss_steps: int = Field(
        1, ge=0, description="A loss that is not finite for this many steps in a row is a fault; 0: never."
    )
    grad_norm_steps: int = Field(
        3,
        ge=0,
        description="A gradient norm that is not finite for this many steps in a row is a fault (a GradScaler skips "
        "some such steps); 0: never.",
    )


class SilencePolicy(_Group):
    """When a machine that does not answer counts as lost."""

    detect_s: float = Field(
        10.0,
        gt=0,
        description="In a job without another failure, a machine whose agent and ranks are silent for this long is an "
        "anomaly, seconds.",
    )
    only_machine_s: float = Field(
        30.0,
        gt=0,
        description="The only machine of a job is an anomaly if its agent and ranks are silent for this long while "
        "another machine of the cluster answers, seconds. In larger jobs, a part of the machines has to answer: "
        "otherwise the workers may be cut off from all of them.",
    )
    evict_s: float = Field(
        2.0, ge=0, description="After a failure, a machine that does not answer for this long counts as gone, seconds."
    )
    retry_max_s: float = Field(
        3.0, gt=0, description="Longest wait of a watcher before it asks a silent agent again, seconds."
    )


class StopPolicy(_Group):
    """How long ranks have to end."""

    grace_s: float = Field(
        5.0, ge=0, description="Time between SIGTERM and SIGKILL when an operator stops a job, seconds."
    )
    exit_grace_s: float = Field(
        60.0, ge=0, description="After a rank ended with code 0, the others have this long to end too, seconds."
    )
    align_s: float = Field(
        30.0,
        ge=0,
        description="Before an urgent update, or before a machine is replaced while ranks step, all ranks have this "
        "long to end the same step, seconds.",
    )
    evict_s: float = Field(
        15.0,
        ge=0,
        description="A machine whose killed ranks are not gone after this time leaves the job if another machine can "
        "replace it, seconds: a process that waits in the kernel for a dead GPU or mount never ends.",
    )
    kill_patience_s: float = Field(
        600.0,
        ge=0,
        description="The job is parked if ranks that were killed are not gone within this time, seconds. The kernel "
        "frees only some GB of memory a second.",
    )


class ParkPolicy(_Group):
    """How long a parked job waits for an operator."""

    timeout_h: float = Field(24.0 * 7, gt=0, description="A parked job is abandoned after this time, hours.")


class RollbackPolicy(_Group):
    """When a version of the code is rolled back."""

    steps: int = Field(20, ge=0, description="A version that fails before this many steps is rolled back.")
    within_s: float = Field(
        300.0, ge=0, description="A version that fails before it has run this long is rolled back, seconds."
    )
    error_within_h: float = Field(
        24.0,
        ge=0,
        description="A version that an update launched less than this time ago, hours, is rolled back at the first "
        "error of the program itself.",
    )


class LadderPolicy(_Group):
    """How far the ladder of diagnose, rollback and replay goes."""

    modes: dict[Rung, RungMode] = Field(
        default_factory=dict,
        description="How far diagnose, rollback and replay may go: act, approve, shadow or off.",
    )
    window_h: float = Field(
        24.0,
        ge=0,
        description="A rung that was tried for the same fault within this time is not tried again, whatever its "
        "result, hours.",
    )
    repeats: int = Field(
        3,
        ge=0,
        description="This many failures of unknown cause with the same symptom in ladder.window_h count as one fault, "
        "whatever machines they name; 0: never.",
    )
    restarts: int = Field(
        5,
        ge=0,
        description="After all rungs were tried for a fault in vain, this many further restarts in ladder.window_h "
        "park the job; 0: never.",
    )


class DiagnosePolicy(_Group):
    """Diagnostic tests of stopped machines."""

    at_once: bool = Field(
        default=False,
        description="Test the machines even before the first restart, if the cause of the failure is unknown.",
    )
    timeout_s: float = Field(
        2000.0,
        gt=0,
        description="Limit of the time of all tests of one machine together, and of each test of a pair, seconds.",
    )
    slow_share: float = Field(
        0.2, ge=0, lt=1, description="A bandwidth below this share of the machines' median is a fault."
    )
    off: list[str] = Field(default_factory=list, description="Tests that are never run.")
    settings: dict[str, dict[str, JsonValue]] = Field(
        default_factory=dict, description="Settings of tests, by their names."
    )


class ReplayPolicy(_Group):
    """The replay of the job on groups of its machines."""

    steps: int = Field(10, ge=1, description="A replay runs this many steps of the script.")
    timeout_s: float = Field(
        300.0,
        gt=0,
        description="A group has this long for its steps, from the first step on; after that it hangs, seconds.",
    )
    machines: int = Field(
        0,
        ge=0,
        description="Machines of a group; 0: a size with which a replay can name a single faulty machine (m ≤ n of "
        "ByteRobust, section 6).",
    )
    fault_share: float = Field(
        0.5, gt=0, le=1, description="A fault shows in this share of the trials in which its machine takes part."
    )
    miss_probability: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Both phases are repeated until such a fault is missed with this probability at most.",
    )
    args: list[str] = Field(
        default_factory=list,
        description="Further arguments of the script in a replay, e.g. for fewer layers (ByteRobust, section 6).",
    )


class UpdatePolicy(_Group):
    """The trial of a new version of the code."""

    check_s: float = Field(
        600.0, gt=0, description="A version that is tried must join the job within this time, seconds."
    )


class EvictPolicy(_Group):
    """Which machines may leave a job without an operator."""

    mode: EvictMode = Field(
        EvictMode.ACT, description="How far all rules of eviction may go: act, approve, shadow or off."
    )
    rules: dict[str, EvictMode] = Field(
        default_factory=dict, description="How far single rules may go: a table of names and modes."
    )
    share: float = Field(
        0.25, ge=0, le=1, description="Share of the machines that may be evicted in the window without an operator."
    )
    at_least: int = Field(
        2, ge=0, description="This many machines may always be evicted in the window, even if the share is smaller."
    )
    window_h: float = Field(
        24.0,
        gt=0,
        description="The window in which evictions are counted, hours. Machines that did not answer count only in the "
        "decision that evicts them.",
    )


class RecoveryPolicy(BaseModel):
    """How often, how fast and how patiently a job is recovered. The table ``[policy]`` of a job file."""

    model_config = ConfigDict(frozen=True, extra="allow")

    retry: RetryPolicy = Field(default_factory=RetryPolicy)
    progress: ProgressPolicy = Field(default_factory=ProgressPolicy)
    storage: StoragePolicy = Field(default_factory=StoragePolicy)
    confirm: ConfirmPolicy = Field(default_factory=ConfirmPolicy)
    hang: HangPolicy = Field(default_factory=HangPolicy)
    slow: SlowPolicy = Field(default_factory=SlowPolicy)
    nan: NanPolicy = Field(default_factory=NanPolicy)
    silence: SilencePolicy = Field(default_factory=SilencePolicy)
    stop: StopPolicy = Field(default_factory=StopPolicy)
    park: ParkPolicy = Field(default_factory=ParkPolicy)
    rollback: RollbackPolicy = Field(default_factory=RollbackPolicy)
    ladder: LadderPolicy = Field(default_factory=LadderPolicy)
    diagnose: DiagnosePolicy = Field(default_factory=DiagnosePolicy)
    replay: ReplayPolicy = Field(default_factory=ReplayPolicy)
    update: UpdatePolicy = Field(default_factory=UpdatePolicy)
    evict: EvictPolicy = Field(default_factory=EvictPolicy)

    def changed(self, settings: Mapping[str, object]) -> RecoveryPolicy:
        """The policy with other values of some settings, by names such as ``hang.floor_s``."""
        tables: dict[str, Any] = {group: getattr(self, group).model_dump(exclude_unset=True) for group in GROUPS}
        for name, value in settings.items():
            group, setting = name.split(".")
            tables[group][setting] = value
        return RecoveryPolicy.model_validate(tables)

    def chosen(self) -> set[str]:
        """Names of the settings that were set explicitly."""
        return {f"{group}.{setting}" for group in GROUPS for setting in getattr(self, group).model_fields_set}

    def value(self, name: str) -> Any:
        """The value of a setting, by a name such as ``hang.floor_s``."""
        group, setting = name.split(".")
        return getattr(getattr(self, group), setting)


GROUPS: dict[str, type[BaseModel]] = {
    name: field.annotation for name, field in RecoveryPolicy.model_fields.items() if isinstance(field.annotation, type)
}
"""The groups of settings, by their names."""


@cache
def settings() -> dict[str, FieldInfo]:
    """All settings, by names such as ``hang.floor_s``."""
    return {
        f"{group}.{setting}": field for group, model in GROUPS.items() for setting, field in model.model_fields.items()
    }
