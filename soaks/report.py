"""Shows the results of a soak, as text or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from console.terminal import PlainConsole, styled
from console.views import drill
from soaks.result import EpisodeResult, SoakResult


def each(episode: EpisodeResult, result: SoakResult) -> None:
    """Print a line about an episode that is over, and the soak's progress."""
    figures = result.summary()
    median, worst = figures["recovered_s_median"], figures["recovered_s_max"]
    times = "" if median is None else f", recoveries: median {median:.1f} s, worst {worst:.1f} s"
    drill.progress(
        f"{figures['faults_tried']}/{result.planned} {episode.meeting}: {outcome(episode)} "
        f"({figures['violated']} violations{times})"
    )


def outcome(episode: EpisodeResult) -> str:
    """Return the outcome of an episode in words."""
    if episode.violations:
        return "VIOLATED: " + "; ".join(episode.violations)
    if episode.not_fired:
        return "did not fire: " + "; ".join(episode.not_fired)
    if episode.recovered_s is None:
        return "absorbed"
    lost = f", {episode.steps_lost} step{'s' if episode.steps_lost > 1 else ''} lost" if episode.steps_lost else ""
    return f"back in {episode.recovered_s:.1f} s{lost}"


def as_json(result: SoakResult) -> str:
    """Return the result as one JSON object: the episodes, the figures of the soak, and counts by kind of fault."""
    by_kind = {
        kind: {"tried": tried, "survived": result.survived[kind]} for kind, tried in sorted(result.tried.items())
    }
    return json.dumps(result.model_dump() | {"ok": result.ok, "by_kind": by_kind} | result.summary(), indent=2)


def show(result: SoakResult, folder: Path) -> None:
    """Print the report."""
    out = PlainConsole()
    table = Table(box=None, pad_edge=False)
    for name in ("fault", "tried", "survived"):
        table.add_column(name)
    for kind, tried in sorted(result.tried.items()):
        table.add_row(kind, str(tried), str(result.survived[kind]))
    out.print(table)
    figures = result.summary()
    out.print(
        f"{figures['faults_survived']} of {figures['faults_tried']} faults survived, of {result.planned} planned; "
        f"{figures['not_fired']} did not fire; {figures['meetings']} different meetings; seed {result.seed}"
    )
    if result.times:
        out.print(f"recoveries: median {figures['recovered_s_median']} s, worst {figures['recovered_s_max']} s")
    if result.stopped:
        out.print(f"ended early: {result.stopped}; resume it with: python -P -m soaks soak --resume {folder}")
    for kind, reason in result.left_out.items():
        out.print(styled(f"  left out   {kind}: {reason}", "dim"), soft_wrap=True)
    for episode in result.episodes:
        for violation in episode.violations:
            out.print(
                styled(f"  violation  episode {episode.number} ({episode.meeting}): {violation}", "red"), soft_wrap=True
            )
    for violation in result.violations:
        out.print(styled(f"  violation  {violation}", "red"), soft_wrap=True)
    if result.reduced:
        episodes = ", ".join(map(str, result.reduced))
        out.print(
            f"episodes {episodes} alone have a violation too: python -P -m soaks soak --plan {folder / 'reduced.json'}"
        )
        meetings = {episode.number: episode.meeting for episode in result.episodes}
        for number in result.reduced:
            out.print(f"  episode {number}: {meetings.get(number, 'needs the network')}")
    for line in drill.commands(result.kept, before=result.prefix):
        out.print(f"  {line}", soft_wrap=True)
