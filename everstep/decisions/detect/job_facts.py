"""The facts about one generation of a job at one moment, and the form of a detection rule.

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
    """The rank's training loop ran to the end."""
    heard_ns: int = 0
    """When the watcher learned of the end."""


@dataclass(frozen=True, slots=True)
class ReportedNumber:
    """The loss, or the gradient norm, as a rank reports it."""

    known: bool = False
    """The rank reported a finite value before; without that, the script may not have the value at all."""
    bad_steps: int = 0
    """The number of reports in a row, up to the newest, in which the value was NaN or infinite."""
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
    """The number of comparisons in a row in which most of the rank's steps were slower."""
    tokens_per_s: float = 0.0
    """0: not known, or the script gives none."""
    typical_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The state of one rank, as its machine showed it last."""

    rank: int
    machine: str
    alive: bool
    completed_steps: int
    """-1: the script does not count steps."""
    steps: int
    """Completed steps, or reports or calls of the optimizer where the script does not count steps."""
    stepped: bool
    """The rank's process completed a step, as far as it shows steps."""
    steps_since: int
    """Steps since its process was seen to step first."""
    in_loop: bool
    """The rank is within ``run.steps``."""
    left_loop: bool
    """The rank's training loop is over, at its end or by ``break``: its present work is not a step."""
    saved_step: int | None
    """The newest step in the rank's own memory. If the rank saved in an earlier generation and not yet in this
    generation: the step at which this generation began. -1: no step was ever saved. None: the agent does not report
    it."""
    saved_ns: int
    """When that step was saved, perhaps by an earlier generation. 0: never."""
    first_step_ns: int
    """When the rank's process completed its first step; 0: not yet."""
    heard_ns: int
    """When the machine reported this state."""
    stepped_ns: int = 0
    """When the rank completed its newest step, by the watcher's clock and never too early; 0: the agent does not report
    it."""
    stopped_ns: int = 0
    """Since when its process was seen to be stopped (state T), by the watcher's clock; 0: it is not."""
    continued_ns: int = 0
    """When the rank's process was seen to continue after it had been stopped, by the watcher's clock; 0: never."""
    reported_step: int = -1
    """The step of the newest report; -1: there was none, or its agent does not report it."""
    loss: ReportedNumber = NOT_REPORTED
    grad_norm: ReportedNumber = NOT_REPORTED
    pace: RankPace | None = None
    """The rank's pace; None: the rank does not report, or its agent does not pass it on."""


@dataclass(frozen=True, slots=True)
class FindingSeen:
    """A finding of an inspection of a machine of the job that no incident has reported yet."""

    id: str
    """Id of the observation; of what was asked for: machine, finding, and since when."""
    machine: str
    finding: Finding
    heard_ns: int
    """When the watcher learned of the observation."""
    sequence: int = 0
    """The number of the observation in its agent's log; 0: it is from an inspection that was requested."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts about one generation of a job now."""

    spec: JobSpec
    generation: int
    now_ns: int
    exits: Mapping[int, ObservedExit] = field(default_factory=dict)
    """Rank → how it ended."""
    ranks: Sequence[RankFacts] = ()
    """Those that were shown so far."""
    newest: bool = True
    """No later generation was seen. For an earlier generation only ends of ranks count: the rest is over."""
    quiet_s: float = 0.0
    """How long no rank has completed a step, as far as that was watched, seconds; 0 also if no step is expected."""
    typical_step_s: float = 0.0
    """Median time of a step of the job; 0: not known yet."""
    longest_step_s: float = 0.0
    """The longest time between two steps of this generation; 0: not known yet."""
    last_step: int = 0
    """The most steps that any rank has shown."""
    slower_s: float = 0.0
    """How long most ranks have been slower than before, as far as that was watched."""
    hang_check: HangCheck | None = None
    """The result of samples of the ranks since the last step; None: there were none."""
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Machine that ran this generation and knows nothing of the job any more → the ranks that it ran."""
    machine_names: Sequence[str] = ()
    """The names of all machines of the job, in order."""
    silent: Sequence[str] = ()
    """Machines whose agents have been silent for a while."""
    unheard_s: Mapping[str, float] = field(default_factory=dict)
    """Machine → how long its agent has been silent, as far as that was watched, seconds."""
    findings: Sequence[FindingSeen] = ()
    """The observations in the order in which the watcher learned of them."""
    faults_accepted: Mapping[str, int] = field(default_factory=dict)
    """Reason code → when such a fault of a machine was reported to the job last."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A detection rule: it maps the facts of one generation to an anomaly, or to none."""

    name: str
    """The stable name that is kept with each anomaly of the rule."""
    finds: str
    """The anomaly that the rule detects, in one line."""
    threshold: str
    """The condition for the anomaly; ``{policy.…}`` and ``{checkpoint.…}`` are replaced by the numbers of a job."""
    source: str
    """The source of the threshold; empty: the papers leave it open."""
    find: Callable[[JobFacts], Anomaly | None]
    """Keeps nothing between two calls."""
