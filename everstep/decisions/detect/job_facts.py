"""The facts about one generation of a job at one moment, and the type of a detection rule.

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
    """The end of one rank, as its agent observed it."""

    id: str
    """Id of the observation."""
    end: RankExit
    finished: bool
    """The rank's training loop ran to the end."""
    heard_ns: int = 0
    """When the watcher learned of the end."""


@dataclass(frozen=True, slots=True)
class ReportedNumber:
    """The loss or the gradient norm, as a rank reports it."""

    known: bool = False
    """The rank has reported a finite value; otherwise its script may not have such a value."""
    bad_steps: int = 0
    """The number of reports in a row, up to the newest, in which the value was NaN or infinite."""
    since: int = -1
    """The step of the first of these reports; -1: there are none."""


NOT_REPORTED = ReportedNumber()


@dataclass(frozen=True, slots=True)
class RankPace:
    """The speed of a rank's steps by its reports, and its own past (``everstep.decisions.detect.metric_watch``)."""

    step_s: float
    """The mean time of the last steps."""
    typical_step_s: float
    """The median time of earlier steps; 0: not known yet."""
    slow_since: int = -1
    """The step from which on the rank is slower than before; -1: it is not slower."""
    slow_comparisons: int = 0
    """The number of comparisons in a row in which most of the rank's steps were slower."""
    tokens_per_s: float = 0.0
    """The speed in tokens; 0: not known, or the script reports no tokens."""
    typical_tokens_per_s: float = 0.0
    """The median speed of earlier steps; 0: not known yet, or the script reports no tokens."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The state of one rank, as its machine last showed it."""

    rank: int
    machine: str
    alive: bool
    completed_steps: int
    """The number of completed steps; -1: the script does not count steps."""
    steps: int
    """The number of completed steps; if the script does not count steps, of reports or of calls of the optimizer."""
    stepped: bool
    """The rank's process completed a step, as far as it shows steps."""
    steps_since: int
    """The number of steps since the rank's process was first seen to step."""
    in_loop: bool
    """The rank is within ``run.steps``."""
    left_loop: bool
    """The rank's training loop is over, at its end or by ``break``, and its present work is not a step."""
    saved_step: int | None
    """The newest step in the rank's own memory; -1: no step was ever saved; None: the agent does not report it. If the
    rank saved only in an earlier generation, it is the step at which this generation began."""
    saved_ns: int
    """When that step was saved, perhaps by an earlier generation; 0: never."""
    first_step_ns: int
    """When the rank's process completed its first step; 0: not yet."""
    heard_ns: int
    """When the machine reported this state."""
    stepped_ns: int = 0
    """When the rank completed its newest step, by the watcher's clock and never too early; 0: the agent does not report
    it."""
    stopped_ns: int = 0
    """Since when the rank's process is seen to be stopped (state T), by the watcher's clock; 0: it is not stopped."""
    continued_ns: int = 0
    """When the rank's process was seen to continue after it had been stopped, by the watcher's clock; 0: never."""
    reported_step: int = -1
    """The step of the newest report; -1: there was none, or the agent does not report it."""
    loss: ReportedNumber = NOT_REPORTED
    grad_norm: ReportedNumber = NOT_REPORTED
    pace: RankPace | None = None
    """The rank's pace; None: the rank does not report its steps, or the agent does not pass the reports on."""


@dataclass(frozen=True, slots=True)
class FindingSeen:
    """A finding about a machine of the job that no incident has reported yet."""

    id: str
    """The id of the observation; for a requested inspection it is made from machine, finding and time."""
    machine: str
    finding: Finding
    heard_ns: int
    """When the watcher learned of the finding."""
    sequence: int = 0
    """The number of the observation in its agent's log; 0: the inspection was requested."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts about one generation of a job at one moment."""

    spec: JobSpec
    generation: int
    now_ns: int
    exits: Mapping[int, ObservedExit] = field(default_factory=dict)
    """Rank → its end."""
    ranks: Sequence[RankFacts] = ()
    """The ranks that were shown so far."""
    newest: bool = True
    """No later generation was seen; False: only ends of ranks count, since the generation is over."""
    quiet_s: float = 0.0
    """How long no rank has completed a step while the watcher watched, seconds; 0 also if no step is expected."""
    typical_step_s: float = 0.0
    """The median time of a step of the job; 0: not known yet."""
    longest_step_s: float = 0.0
    """The longest time between two steps of this generation; 0: not known yet."""
    last_step: int = 0
    """The largest number of steps of any rank."""
    slower_s: float = 0.0
    """How long most ranks have been slower than before while the watcher watched, seconds."""
    hang_check: HangCheck | None = None
    """The result of samples of the ranks since the last step; None: there were none."""
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Machine that ran this generation and lost its memory → the ranks that it ran."""
    machine_names: Sequence[str] = ()
    """The names of all machines of the job, in order."""
    silent: Sequence[str] = ()
    """Machines whose agents have been silent for a while."""
    unheard_s: Mapping[str, float] = field(default_factory=dict)
    """Machine → how long its agent has been silent while the watcher watched, seconds."""
    others_answer: bool = False
    """The only machine of the job does not answer, and another machine of the cluster does."""
    findings: Sequence[FindingSeen] = ()
    """The findings in the order in which the watcher learned of them."""
    faults_accepted: Mapping[str, int] = field(default_factory=dict)
    """Reason code → when the job last accepted such a fault of a machine."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A detection rule: it maps the facts about one generation to an anomaly, or to None."""

    name: str
    """The stable name that is kept with each anomaly of the rule."""
    finds: str
    """The anomaly that the rule detects, in one line."""
    threshold: str
    """The condition for the anomaly; ``{policy.…}`` and ``{checkpoint.…}`` are replaced by the numbers of a job."""
    find: Callable[[JobFacts], Anomaly | None]
    """The function of the rule; it has no state."""
    source: str = ""
    """The source of the threshold; empty: the papers do not state one."""
