"""The results of a soak as data: for ``--json``, for the report, and for a soak that is resumed."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, Field

from everstep.system import private_files as private
from soaks.plan import Episode, Setting


class EpisodeResult(BaseModel):
    """The result of one episode."""

    number: int
    meeting: str
    kinds: list[str]
    steps: tuple[int, int] = (0, 0)
    """Step of the episode's gate, and of the next gate."""
    not_fired: list[str] = Field(
        default_factory=list, description="Faults of the episode that did not fire, with the reasons."
    )
    recovered_s: float | None = None
    """Time from the first fault until all ranks completed a step after the last incident; None: no incident."""
    steps_lost: int = 0
    incidents: list[str] = Field(default_factory=list)
    violations: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    """Time from opening the gate until the observations at the next gate."""

    @property
    def survived(self) -> bool:
        """Whether all its faults fired and no invariant was violated."""
        return not self.not_fired and not self.violations


class PartResult(BaseModel):
    """The end of all episodes of one setting, with the violations after the job and the cluster ended."""

    setting: Setting
    violations: list[str] = Field(default_factory=list)


class SoakResult(BaseModel):
    """The result of a soak so far."""

    seed: int
    planned: int
    """Number of faults in the plan."""
    episodes: list[EpisodeResult] = Field(default_factory=list)
    violations: list[str] = Field(
        default_factory=list, description="Violations after the end of a job or of a cluster."
    )
    stopped: str = ""
    """Why the soak ended early; empty: it ran the complete plan."""
    left_out: dict[str, str] = Field(
        default_factory=dict, description="Kinds of fault that are left out, with the reasons."
    )
    kept: str = ""
    """Folder of the cluster that is left up after a violation."""
    prefix: str = ""
    """Text that a user has to put before a command so that it reaches this cluster."""
    reduced: list[int] = Field(default_factory=list, description="Numbers of fewer episodes that have a violation too.")

    @property
    def ok(self) -> bool:
        """Whether no invariant was violated."""
        return not self.violations and not any(episode.violations for episode in self.episodes)

    @property
    def tried(self) -> Counter[str]:
        """Kind of fault → number of its faults that were tried."""
        return Counter(kind for episode in self.episodes for kind in episode.kinds)

    @property
    def survived(self) -> Counter[str]:
        """Kind of fault → number of its faults in episodes that were survived."""
        return Counter(kind for episode in self.episodes if episode.survived for kind in episode.kinds)

    @property
    def times(self) -> list[float]:
        """Durations of the recoveries, sorted, seconds."""
        return sorted(episode.recovered_s for episode in self.episodes if episode.recovered_s is not None)

    def summary(self) -> dict[str, object]:
        """Return the figures of the complete soak."""
        times = self.times
        return {
            "faults_tried": self.tried.total(),
            "faults_survived": self.survived.total(),
            "episodes_run": len(self.episodes),
            "meetings": len({episode.meeting for episode in self.episodes if episode.survived}),
            "not_fired": sum(len(episode.not_fired) for episode in self.episodes),
            "recovered_s_median": round(statistics.median(times), 3) if times else None,
            "recovered_s_max": round(times[-1], 3) if times else None,
            "steps_lost": sum(episode.steps_lost for episode in self.episodes),
            "violated": len(self.violations) + sum(len(episode.violations) for episode in self.episodes),
        }


class Journal:
    """A file with one line for each finished episode, so that a killed soak can be resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[list[EpisodeResult], list[PartResult]]:
        """Read the finished episodes and parts. An incomplete last line is removed, so that lines can be added."""
        if not self.path.exists():
            return [], []
        complete, _, torn = self.path.read_text().rpartition("\n")
        if torn:
            private.replace(self.path, f"{complete}\n" if complete else "")
        rows = [json.loads(line) for line in complete.splitlines()]
        parts = [PartResult.model_validate(row) for row in rows if "setting" in row]
        episodes = {row["number"]: EpisodeResult.model_validate(row) for row in rows if "setting" not in row}
        return list(episodes.values()), parts  # if an episode ran twice, the later line counts

    def add(self, part: EpisodeResult | PartResult) -> None:
        """Add a finished episode, or the end of a part."""
        with self.path.open("a") as file:
            file.write(part.model_dump_json() + "\n")


def no_result(episode: Episode) -> EpisodeResult:
    """Return the result of an episode before it runs."""
    return EpisodeResult(number=episode.number, meeting=episode.meeting, kinds=list(episode.kinds))
