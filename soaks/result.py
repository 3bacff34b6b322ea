"""The results of a soak: data for ``--json``, for resuming and for the report."""

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
    """The steps of its gate and of the next gate."""
    not_fired: list[str] = Field(default_factory=list, description="Faults of it that did not fire, and why.")
    recovered_s: float | None = None
    """Seconds from the first fault to the step that all ranks completed after the last incident; None: no incident."""
    steps_lost: int = 0
    incidents: list[str] = Field(default_factory=list)
    violations: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    """Seconds from opening the gate to the observation at the next gate."""

    @property
    def survived(self) -> bool:
        """Whether all its faults fired and no invariant was violated."""
        return not self.not_fired and not self.violations


class PartResult(BaseModel):
    """The end of all episodes of one setting: the job's last state, and what is left of the cluster, were looked at."""

    setting: Setting
    violations: list[str] = Field(default_factory=list)


class SoakResult(BaseModel):
    """The result of a soak so far."""

    seed: int
    planned: int
    """Number of faults in the plan."""
    episodes: list[EpisodeResult] = Field(default_factory=list)
    violations: list[str] = Field(default_factory=list, description="Of the whole: at the end, or at the cluster's.")
    stopped: str = ""
    """Why it ended before its plan; empty: it ran the whole plan."""
    left_out: dict[str, str] = Field(default_factory=dict, description="Kinds of fault that no soak here draws.")
    kept: str = ""
    """The cluster that was left up after a violation."""
    prefix: str = ""
    """Prefix that commands need to reach it; empty: none."""
    reduced: list[int] = Field(default_factory=list, description="Numbers of the episodes that are enough for it.")

    @property
    def ok(self) -> bool:
        """Whether no invariant was violated."""
        return not self.violations and not any(episode.violations for episode in self.episodes)

    @property
    def tried(self) -> Counter[str]:
        """Kind → faults of it that were tried."""
        return Counter(kind for episode in self.episodes for kind in episode.kinds)

    @property
    def survived(self) -> Counter[str]:
        """Kind → faults of it in episodes that fired whole and violated nothing."""
        return Counter(kind for episode in self.episodes if episode.survived for kind in episode.kinds)

    @property
    def times(self) -> list[float]:
        """Times of recoveries, sorted, seconds."""
        return sorted(episode.recovered_s for episode in self.episodes if episode.recovered_s is not None)

    def summary(self) -> dict[str, object]:
        """The figures of the whole."""
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
    """A file with one line for each finished episode, so that a killed soak can resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[list[EpisodeResult], list[PartResult]]:
        """Read the finished episodes. A torn last line is removed, so that lines can be added."""
        if not self.path.exists():
            return [], []
        whole, _, torn = self.path.read_text().rpartition("\n")
        if torn:
            private.replace(self.path, f"{whole}\n" if whole else "")
        rows = [json.loads(line) for line in whole.splitlines()]
        parts = [PartResult.model_validate(row) for row in rows if "setting" in row]
        episodes = {row["number"]: EpisodeResult.model_validate(row) for row in rows if "setting" not in row}
        return list(episodes.values()), parts  # for an episode that was run again, the later line counts

    def add(self, part: EpisodeResult | PartResult) -> None:
        """Record that an episode, or all episodes of a setting, are over."""
        with self.path.open("a") as file:
            file.write(part.model_dump_json() + "\n")


def undisturbed(episode: Episode) -> EpisodeResult:
    """The result of an episode of which nothing is known yet."""
    return EpisodeResult(number=episode.number, meeting=episode.meeting, kinds=list(episode.kinds))
