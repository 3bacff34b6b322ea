"""The reports of agents, merged into one picture of the job."""

from __future__ import annotations

import math

import pytest

from agent.fake import NEVER, FakeAgent, Silence
from agent.v1 import agent_pb2 as pb
from controlplane.progress import ProgressFeed, RankView, Rate, merge, views_of
from everstep.model.topology import Topology
from tests.activities.spoken import reached

S = 10**9


def view(rank: int, **changes: object) -> RankView:
    given: dict[str, object] = {
        "rank": rank,
        "machine": f"m{rank // 2}",
        "generation": 1,
        "pid": 100 + rank,
        "alive": True,
        "attached": True,
        "finished": False,
        "completed_steps": 10,
        "optimizer_steps": 10,
        "loss": math.nan,
        "tokens": 100,
    }
    return RankView(**(given | changes))  # type: ignore[arg-type]


def test_the_slowest_rank_of_the_newest_generation_counts() -> None:
    picture = merge(
        [view(0, generation=2, completed_steps=7), view(1, generation=2, completed_steps=8), view(2)],
        time_ns=1,
        silent=["m9", "m3"],
    )
    assert (picture.generation, picture.step, sorted(picture.ranks)) == (2, 7, [0, 1])
    assert picture.silent == ("m3", "m9")


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"completed_steps": -1}, None),  # it has joined, but not restored yet
        (
            {"attached": False, "optimizer_steps": 0},
            None,
        ),  # its script has not joined yet, or does not use everstep and has made no step
        ({"attached": False, "optimizer_steps": 4, "completed_steps": -1}, 4),  # a script that does not use everstep
        ({"completed_steps": 0, "optimizer_steps": 0}, 0),  # it has joined, and starts from the beginning
    ],
)
def test_an_unknown_step_is_not_shown_as_zero(changes: dict[str, object], step: int | None) -> None:
    assert merge([view(0), view(1, **changes)], time_ns=1).step == step


def test_the_last_report_of_a_silent_machine_counts_as_old() -> None:
    """The job completed more steps while the control plane could not reach one machine."""
    views = [view(0, completed_steps=30), view(1, completed_steps=31), view(2, completed_steps=12)]

    assert merge(views, time_ns=1).step == 12
    assert merge(views, time_ns=1, silent=["m1"]).step == 30
    assert merge(views, time_ns=1, silent=["m0", "m1"]).step == 12, (
        "no machine answers, so the last reports of all machines count"
    )


@pytest.mark.parametrize(
    ("ranks", "silent", "quiet_since_s"),
    [
        ([{}, {}], [], None),  # nothing is known: an older release, or no step yet
        ([{"stepped_ns": 60 * S, "step_s": 0.1}, {"stepped_ns": 80 * S, "step_s": 0.1}], [], 80),
        ([{"stepped_ns": 60 * S, "step_s": 0.1}, {"stepped_ns": 91 * S, "step_s": 0.1}], [], None),  # rank 1 steps
        ([{"stepped_ns": 80 * S, "step_s": 0.1}, {"stepped_ns": 80 * S}], [], None),  # rank 1 may be in its first step
        ([{"stepped_ns": 80 * S, "step_s": 1.9}], [], 80),
        ([{"stepped_ns": 80 * S, "step_s": 2.1}], [], None),  # 20 s are no long pause for such steps
        ([{"stepped_ns": 80 * S, "step_s": 0.1}, {"stepped_ns": 0}], [], 80),
        ([{"stepped_ns": 80 * S, "step_s": 0.1, "finished": True}], [], None),  # the rank has no step left
        ([{"stepped_ns": 80 * S, "step_s": 0.1, "alive": False}], [], 80),
        ([{"stepped_ns": 80 * S, "step_s": 0.1}], ["m0"], None),  # the rank may step unseen
    ],
)
def test_a_job_is_quiet_when_no_rank_steps_for_longer_than_steps_take(
    ranks: list[dict[str, object]], silent: list[str], quiet_since_s: int | None
) -> None:
    picture = merge([view(rank, **changes) for rank, changes in enumerate(ranks)], time_ns=100 * S, silent=silent)
    assert picture.quiet_since_ns == (quiet_since_s and quiet_since_s * S)


def test_times_of_a_machine_with_a_wrong_clock_are_converted_to_ours() -> None:
    told = pb.RankProgress(
        rank=0, stepped_ns=31 * S, reports=11, milestones=pb.Milestones(first_step=11 * S), completed_steps=11
    )
    (found,) = views_of("m0", [told], 1000 * S)
    assert (found.stepped_ns, found.step_s) == (1031 * S, 2.0)
    (unknown,) = views_of("m0", [pb.RankProgress(rank=0, reports=1)], 1000 * S)
    assert (unknown.stepped_ns, unknown.step_s) == (0, 0.0)


def test_the_loss_comes_from_a_rank_that_has_one() -> None:
    assert merge([view(0), view(1, loss=2.5), view(2, loss=2.6)], time_ns=1).loss == 2.5
    assert merge([view(0), view(1, loss=math.inf)], time_ns=1).loss is None


def test_ranks_of_one_replica_train_on_the_same_tokens() -> None:
    topology = Topology.of(machines=4, ranks_per_machine=2, tp=2, pp=2)
    picture = merge([view(rank, tokens=0 if topology.coordinate(rank).pp else 100) for rank in range(8)], time_ns=1)
    assert picture.tokens(topology) == 200  # there are two data-parallel replicas


def test_a_rate_is_a_mean_over_its_window_and_restarts_after_a_decrease() -> None:
    rate = Rate(window_s=10.0)
    rate.add(0, 0)
    assert rate.per_second is None
    for second in range(1, 21):
        rate.add(second if second <= 10 else 10 + 3 * (second - 10), second * S)
    assert rate.per_second == pytest.approx(3.0)  # the window does not include the slow first half
    rate.add(5, 21 * S)
    assert rate.per_second is None
    rate.add(7, 22 * S)
    assert rate.per_second == pytest.approx(2.0)


def saying(rank: int, step: int) -> list[pb.ProgressReply | Silence]:
    """Return the reports of a machine whose only rank has completed ``step`` steps."""
    return [
        pb.ProgressReply(generation=1, ranks=[pb.RankProgress(rank=rank, generation=1, completed_steps=step)]),
        NEVER,
    ]


async def test_a_feed_follows_a_job_to_replacement_machines() -> None:
    agents = [FakeAgent(f"m{number}", progress=saying(min(number, 1), 10 + number)) for number in range(3)]
    async with reached(agents) as (clients, machines), ProgressFeed(clients, "gpt", machines[:2]) as feed:
        pictures = feed.pictures()
        while sorted((await anext(pictures)).ranks) != [0, 1]:
            pass

        feed.move_to([machines[0], machines[2]])

        while {view.machine for view in feed.current.ranks.values()} != {"m0", "m2"}:
            await anext(pictures)
        assert feed.current.ranks[1].completed_steps == 12
