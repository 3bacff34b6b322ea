"""What a soak found: data for ``--json``, for resuming and for the report."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, Field

from everstep.system import private_files as private
from soaks.plan import Episode, Setting


class EpisodeResult(BaseModel):
    """What came of one episode."""

    number: int
    meeting: str
    kinds: list[str]
    steps: tuple[int, int] = (0, 0)
    """From its gate to the next one."""
    not_fired: list[str] = Field(default_factory=list, description="Faults of it that did not fire, and why.")
    recovered_s: float | None = None
    """From the first fault to the step that all ranks completed after the last incident; None: there was none."""
    steps_lost: int = 0
    incidents: list[str] = Field(default_factory=list)
    violations: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    """From opening the gate to the look at the next one."""

    @property
    def survived(self) -> bool:
        """All its faults fired, and nothing was violated."""
        return not self.not_fired and not self.violations


class PartResult(BaseModel):
    """The end of all episodes of one setting: the job's last state, and what is left of the cluster, were looked at."""

    setting: Setting
    violations: list[str] = Field(default_factory=list)


class SoakResult(BaseModel):
    """A soak as far as it came."""

    seed: int
    planned: int
    """Faults in the plan."""
    episodes: list[EpisodeResult] = Field(default_factory=list)
    violations: list[str] = Field(default_factory=list, description="Of the whole: at the end, or at the cluster's.")
    stopped: str = ""
    """Why it ended before its plan did; empty: it did not."""
    left_out: dict[str, str] = Field(default_factory=dict, description="Kinds of fault that no soak here draws.")
    kept: str = ""
    """The cluster that was left up after a violation."""
    prefix: str = ""
    """What comes before commands that shall reach it; empty: nothing."""
    reduced: list[int] = Field(default_factory=list, description="Numbers of the episodes that are enough for it.")

    @property
    def ok(self) -> bool:
        """Nothing was violated."""
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
        """Recoveries, seconds, sorted."""
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
    """What was done, one line for each episode, so that a soak that died can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[list[EpisodeResult], list[PartResult]]:
        """What was done. A torn last line was not: it is taken away, so that more can be added."""
        if not self.path.exists():
            return [], []
        whole, _, torn = self.path.read_text().rpartition("\n")
        if torn:
            private.replace(self.path, f"{whole}\n" if whole else "")
        rows = [json.loads(line) for line in whole.splitlines()]
        parts = [PartResult.model_validate(row) for row in rows if "setting" in row]
        episodes = {row["number"]: EpisodeResult.model_validate(row) for row in rows if "setting" not in row}
        return list(episodes.values()), parts  # of one that was run again the later word counts

    def add(self, part: EpisodeResult | PartResult) -> None:
        """Note that an episode, or all episodes of a setting, are over."""
        with self.path.open("a") as file:
            file.write(part.model_dump_json() + "\n")


def undisturbed(episode: Episode) -> EpisodeResult:
    """The result of an episode of which nothing is known yet."""
    return EpisodeResult(number=episode.number, meeting=episode.meeting, kinds=list(episode.kinds))
