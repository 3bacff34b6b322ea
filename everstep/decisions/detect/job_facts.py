"""The facts of one generation of a job at one moment, and what a rule of detection looks like.

Times are nanoseconds of the watcher's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.decisions.blame.hang.progress import HangCheck
from everstep.model.evidence import RankExit
from everstep.model.finding import Finding
from everstep.model.incident import Anomaly
from everstep.model.job import JobSpec


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """One rank's end, as its agent observed it."""

    id: str
    """Id of the observation."""
    end: RankExit
    finished: bool
    """Its training loop ran to the end."""
    heard_ns: int = 0
    """When the watcher heard of it."""


@dataclass(frozen=True, slots=True)
class ReportedNumber:
    """The loss, or the gradient norm, as a rank reports it."""

    known: bool = False
    """The rank reported a finite one before; without that nothing says that it has one."""
    bad_steps: int = 0
    """In so many reports in a row, up to the newest, it was NaN or infinite."""
    since: int = -1
    """Step of the first of these; -1: there are none."""


NOT_REPORTED = ReportedNumber()


@dataclass(frozen=True, slots=True)
class RankPace:
    """How fast a rank steps by its reports, against its own past (``everstep.decisions.detect.metric_watch``)."""

    step_s: float
    """Mean time of the last steps."""
    typical_step_s: float
    """Median before them; 0: not known yet."""
    slow_since: int = -1
    """Step from which on it is slower than it was; -1: it is not."""
    slow_looks: int = 0
    """So many comparisons in a row found most of its steps slower."""
    tokens_per_s: float = 0.0
    """0: not known, or the script gives none."""
    typical_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a machine showed of one of its ranks last."""

    rank: int
    machine: str
    alive: bool
    completed_steps: int
    """-1: the script does not count steps."""
    steps: int
    """Completed steps, or reports or calls of the optimizer where the script does not count steps."""
    stepped: bool
    """Its process completed a step, as far as it shows any."""
    steps_since: int
    """Steps since its process was seen to step first."""
    in_loop: bool
    """It is within ``run.steps``."""
    left_loop: bool
    """Its training loop is over, at its end or by ``break``: what it does now are no steps."""
    saved_step: int | None
    """Newest step in its own memory; where it saved in an earlier generation and not yet in this one, the step that
    this one began with. -1: none was ever saved. None: its agent does not say."""
    saved_ns: int
    """When that was saved; it may have been by an earlier generation. 0: never."""
    first_step_ns: int
    """When its process completed its first step; 0: not yet."""
    heard_ns: int
    """When its machine said all this."""
    stepped_ns: int = 0
    """When it completed its newest step, by the watcher's clock and not before it was; 0: its agent does not say."""
    stopped_ns: int = 0
    """Since when its process was seen to be stopped (state T), by the watcher's clock; 0: it is not."""
    continued_ns: int = 0
    """When its process was seen to go on after it had been stopped, by the watcher's clock; 0: never."""
    reported_step: int = -1
    """The step of the newest report; -1: there was none, or its agent does not report it."""
    loss: ReportedNumber = NOT_REPORTED
    grad_norm: ReportedNumber = NOT_REPORTED
    pace: RankPace | None = None
    """None: it does not report, or its agent does not say."""


@dataclass(frozen=True, slots=True)
class FindingSeen:
    """A finding of an inspection of a machine of the job that no incident has reported yet."""

    id: str
    """Id of the observation; of what was asked for: machine, finding, and since when."""
    machine: str
    finding: Finding
    heard_ns: int
    """When the watcher heard of it."""
    sequence: int = 0
    """Number of the observation in its agent's log; 0: the agent said it when it was asked what it finds."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of one generation of a job now."""

    spec: JobSpec
    generation: int
    now_ns: int
    exits: Mapping[int, ObservedExit] = field(default_factory=dict)
    """Rank → how it ended."""
    ranks: Sequence[RankFacts] = ()
    """Those that were shown so far."""
    newest: bool = True
    """No later generation was seen. Of an earlier one only ends of ranks count: the rest is over."""
    quiet_s: float = 0.0
    """How long no rank has completed a step, as far as that was watched; 0 too where no step is to be expected."""
    typical_step_s: float = 0.0
    """Median time of a step of the job; 0: not known yet."""
    longest_step_s: float = 0.0
    """The longest time between two steps of this generation; 0: not known yet."""
    last_step: int = 0
    """The most steps that any rank has shown."""
    slower_s: float = 0.0
    """How long most ranks have been slower than they were, as far as that was watched."""
    hang_check: HangCheck | None = None
    """What samples of its ranks show since the last step; None: there were none."""
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Machine that ran this generation and knows nothing of the job any more → the ranks that it ran."""
    machine_names: Sequence[str] = ()
    """The names of all machines of the job, in order."""
    silent: Sequence[str] = ()
    """Machines whose agents have said nothing for a while."""
    unheard_s: Mapping[str, float] = field(default_factory=dict)
    """Machine → since when its agent has said nothing, as far as that was watched, seconds."""
    findings: Sequence[FindingSeen] = ()
    """In the order in which they were heard of."""
    faults_accepted: Mapping[str, int] = field(default_factory=dict)
    """Reason code → when such a fault of a machine was reported to the job last."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to see that a job does not train as it should: the facts of one generation in, an anomaly or none out."""

    name: str
    """Kept with each anomaly that the rule finds; it does not change."""
    finds: str
    """What it finds, in one line."""
    threshold: str
    """When that is an anomaly; ``{policy.…}`` and ``{checkpoint.…}`` stand for the numbers of a job."""
    source: str
    """Where the threshold is from; empty: the papers leave it open."""
    find: Callable[[JobFacts], Anomaly | None]
    """Keeps nothing between two calls."""
