"""Whether a restarted job steps again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.incident import Confirmation
from everstep.policy import RecoveryPolicy


@dataclass(frozen=True, slots=True)
class RankState:
    """Where one rank of the generation stands; times in nanoseconds of the wall clock, 0: not yet."""

    rank: int
    alive: bool
    attached: bool
    finished: bool
    completed_steps: int
    optimizer_steps: int
    code: int | None = None
    """Exit code; None while it is alive, or when it ended otherwise."""
    forked_ns: int = 0
    script_ns: int = 0
    joined_ns: int = 0
    restored_ns: int = 0
    first_step_ns: int = 0
    entered_ns: int = 0

    @property
    def stepped(self) -> bool:
        """Whether this process completed a step, as far as it shows steps at all."""
        if self.attached:
            return self.first_step_ns > 0 or self.finished
        return self.optimizer_steps > 0

    @property
    def left_with_success(self) -> bool:
        """Whether it had nothing left to do: code 0, and to the end of its loop where it has one."""
        return self.code == 0 and (self.finished or not self.attached)


def judge_confirmation(
    generation: int,
    ranks: Sequence[RankState],
    *,
    world_size: int,
    shows_steps: bool,
    now_ns: int,
    policy: RecoveryPolicy,
    emptied: Sequence[str] = (),
) -> Confirmation | None:
    """Confirmed, failed, or None while it is open.

    Args:
        generation: The generation that was launched.
        ranks: What the agents show of it.
        world_size: Ranks at full width; fewer are never confirmed.
        shows_steps: The script is known to report steps, so being alive is not enough.
        now_ns: Time now.
        policy: How long a silent script must live to count.
        emptied: Machines that took part in the launch and know nothing of it: they, and their ranks, were lost.
    """
    ended = sorted(rank.rank for rank in ranks if not (rank.alive or rank.stepped or rank.left_with_success))
    if emptied or ended:
        what = f"{', '.join(emptied[:8])} came back empty"
        if not emptied:
            what = f"rank {', '.join(map(str, ended[:8]))} ended"
        return Confirmation(
            generation=generation, ok=False, reason=f"{what} before the first step", emptied=list(emptied)
        )
    if len(ranks) < world_size:
        return None
    if all(rank.stepped for rank in ranks):
        stepped_ns = max((rank.first_step_ns for rank in ranks), default=0) or now_ns
        return Confirmation(
            generation=generation,
            ok=True,
            reason=f"all {world_size} ranks completed a step",
            stepped_ns=stepped_ns,
            completed_steps=max((rank.completed_steps for rank in ranks), default=-1),
            parts=parts_of(ranks),
        )
    if all(rank.stepped or rank.left_with_success for rank in ranks):
        # A script that was nearly done: it had no step left, and the end of the job follows at once.
        return Confirmation(
            generation=generation,
            ok=True,
            reason=f"all {world_size} ranks stepped or left with code 0",
            stepped_ns=now_ns,
        )
    youngest_ns = max(rank.forked_ns for rank in ranks)
    lived_s = (now_ns - youngest_ns) / 1e9
    if not shows_steps and youngest_ns and lived_s > policy.confirm_alive_s:
        return Confirmation(
            generation=generation,
            ok=True,
            reason=f"all {world_size} ranks live for {lived_s:.0f} s; the script shows no steps",
            stepped_ns=now_ns,
        )
    return None


def parts_of(ranks: Sequence[RankState]) -> dict[str, float]:
    """Where the time from fork to first step went: seconds by part, of the slowest rank at each milestone."""
    marks = [
        ("start", max((rank.script_ns for rank in ranks), default=0)),
        ("import", max((rank.joined_ns for rank in ranks), default=0)),
        ("rendezvous", max((rank.entered_ns for rank in ranks), default=0)),
        ("restore", max((rank.restored_ns for rank in ranks), default=0)),
        ("next step", max((rank.first_step_ns for rank in ranks), default=0)),
    ]
    before = max((rank.forked_ns for rank in ranks), default=0)
    parts: dict[str, float] = {}
    for name, at in marks:
        if before and at:
            parts[name] = round(max(at - before, 0) / 1e9, 4)
            before = max(at, before)
    return parts
