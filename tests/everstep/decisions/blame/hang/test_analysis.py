"""The verdict on a hang: ranks that are named, groups that are over-evicted, and jobs that are left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.blame.hang.analysis import ONE_SAMPLE, judge_hang
from everstep.decisions.blame.hang.conclusions import HangLimits
from everstep.decisions.blame.hang.progress import HangSign, RankWork, check_hang
from everstep.decisions.blame.hang.rank_samples import CommunicationRecord, JobSamples, PendingOperation, RankSample
from everstep.decisions.blame.hang.stacks import Signature
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.topology import Topology
from tests.everstep.decisions.blame.hang.made import (
    COMPUTES,
    FIGURE_7,
    STUCK,
    SYNC,
    TORCH,
    figure_7,
    of_records,
    of_stacks,
    record,
    stack,
)

EIGHT = Topology.of(8, 1)
WORLD = {"0": tuple(range(8))}


def test_figure_7_evicts_the_pipeline_group_of_machines_12_to_15() -> None:
    verdict = judge_hang(of_stacks(figure_7()), Topology.parse(FIGURE_7))

    assert verdict.conclusion is HangConclusion.OVER_EVICTS
    assert verdict.method is HangMethod.STACKS
    assert (verdict.machines, verdict.ranks) == ((12, 13, 14, 15), tuple(range(24, 32)))
    assert verdict.group is not None
    assert verdict.group.kind == "pp"
    rows = verdict.picture.splitlines()
    assert rows[0].split() == ["dp", "0", "dp", "1", "dp", "2", "dp", "3"]
    assert rows[4].replace(" ", "") == "stage3AAAAAA(D)(D)"


def test_a_rank_that_computes_while_the_others_wait_is_named() -> None:
    verdict = judge_hang(
        of_stacks(dict.fromkeys(range(8), SYNC) | {5: STUCK}), EIGHT, names=[f"m{n}" for n in range(8)]
    )

    assert (verdict.conclusion, verdict.method) == (HangConclusion.NAMES, HangMethod.WAIT_FOR)
    assert (verdict.ranks, verdict.machines, verdict.innocent) == ((5,), (5,), 0)
    assert "rank 5 on m5: 7 ranks wait for it" in verdict.reason


@pytest.mark.parametrize("stacks", [figure_7(), dict.fromkeys(range(32), SYNC) | {5: STUCK}])
def test_one_sample_of_stacks_evicts_no_machine_unless_the_job_is_known_to_hang(stacks: dict[int, Signature]) -> None:
    topology = Topology.parse(FIGURE_7)
    known = of_stacks(stacks)
    assert judge_hang(known, topology).evicts

    verdict = judge_hang(replace(known, is_hung=False), topology)

    assert (verdict.conclusion, verdict.machines) == (HangConclusion.UNKNOWN, ())
    assert "If it hangs: " in verdict.reason


def test_records_alone_name_a_rank_that_has_not_entered_a_collective() -> None:
    records = dict.fromkeys(range(8), record({"0": 9}, ("0", 9))) | {5: record({"0": 8})}

    verdict = judge_hang(of_records(records, WORLD), EIGHT)

    assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, (5,))
    assert any("missing: rank 5" in line for line in verdict.evidence)
    assert ONE_SAMPLE in verdict.evidence


def test_an_unknown_rank_is_named_if_all_others_wait_for_it() -> None:
    records = {rank: record({"0": 9}, ("0", 9)) for rank in range(8) if rank != 5}
    verdict = judge_hang(of_records(records, WORLD), EIGHT)
    assert (verdict.ranks, verdict.unknown) == ((5,), (5,))

    fewer = {rank: records[rank] for rank in range(8) if rank not in (5, 6)}
    verdict = judge_hang(of_records(fewer, WORLD), EIGHT)
    assert (verdict.conclusion, verdict.machines) == (HangConclusion.UNKNOWN, ())
    assert "rank 5, 6" in verdict.reason


def test_a_rank_without_samples_is_not_named_if_another_rank_is_at_fault() -> None:
    """The agent of rank 0 did not answer in time. All other ranks wait for rank 5."""
    inside = RankSample(SYNC, record=record({"0": 7}, ("0", 7)))
    ranks = dict.fromkeys(range(1, 8), inside) | {5: RankSample(STUCK, record=record({"0": 6}))}
    evidence = JobSamples(ranks, {"0": tuple(range(8))}, moved=frozenset(), is_hung=True)

    verdict = judge_hang(evidence, Topology.of(8, 1))

    assert (verdict.conclusion, verdict.ranks, verdict.unknown) == (HangConclusion.NAMES, (5,), (0,))
    assert "rank 0" in verdict.evidence[0]


def test_a_rank_without_a_record_is_not_named_if_stacks_do_not_show_who_waits() -> None:
    """On GPUs, all ranks may be in ``loss.item()`` while their devices wait in a collective."""
    item = stack("train", "step")
    inside = RankSample(item, record=record({"0": 97}, ("0", 97)))
    ranks = dict.fromkeys(range(8), inside) | {5: RankSample(item)}
    evidence = JobSamples(ranks, WORLD, moved=frozenset(), is_hung=True)
    assert judge_hang(evidence, EIGHT).conclusion is HangConclusion.UNKNOWN

    late = replace(evidence, ranks=ranks | {2: RankSample(item, record=record({"0": 96}))})
    assert judge_hang(late, EIGHT).ranks == (2,)

    unresponsive = replace(evidence, ranks=ranks | {5: RankSample(item, is_unresponsive=True)})
    assert judge_hang(unresponsive, EIGHT).ranks == (5,)

    in_python = dict.fromkeys(range(8), replace(inside, trainer=SYNC)) | {5: RankSample(STUCK)}
    assert judge_hang(replace(evidence, ranks=in_python), EIGHT).ranks == (5,)


def test_without_samples_no_rank_is_named() -> None:
    for evidence in (JobSamples({}), JobSamples({3: RankSample()})):
        verdict = judge_hang(evidence, EIGHT)
        assert (verdict.conclusion, verdict.machines) == (HangConclusion.UNKNOWN, ())
        assert verdict.unknown == tuple(range(8))


def test_waiting_is_followed_to_its_end() -> None:
    """The replicas wait for rank 4. Rank 4 waits for its tensor parallel peer 5, which waits for no rank."""
    topology = Topology.of(4, 2, tp=2)
    groups = {f"tp{n}": (2 * n, 2 * n + 1) for n in range(4)} | {"dp0": (0, 2, 4, 6), "dp1": (1, 3, 5, 7)}
    records = {rank: record({f"tp{rank // 2}": 8, f"dp{rank % 2}": 3}, (f"dp{rank % 2}", 3)) for rank in range(8)}
    records |= {4: record({"tp2": 8, "dp0": 2}, ("tp2", 8)), 5: record({"tp2": 7, "dp1": 2})}

    verdict = judge_hang(of_records(records, groups), topology)

    assert (verdict.conclusion, verdict.ranks, verdict.machines) == (HangConclusion.NAMES, (5,), (2,))


def test_p2p_names_the_pair() -> None:
    """All ranks wait for stages 0 and 1 of one replica. These two ranks wait for each other."""
    topology = Topology.of(8, 1, pp=2)
    line = topology.group(0, "pp")
    records = {rank: record({"0": 4}, ("0", 4)) for rank in range(8) if rank not in line}
    for rank, peer, operation in ((line[0], line[1], "recv"), (line[1], line[0], "send")):
        pending = PendingOperation("0", 3, operation, peer=peer, is_p2p=True)
        records[rank] = CommunicationRecord({"0": 3}, (pending,))

    verdict = judge_hang(of_records(records, WORLD), topology)

    assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, line)


def test_a_collective_that_all_entered_over_evicts_its_group() -> None:
    topology = Topology.of(16, 1, tp=4)
    groups = {"0": tuple(range(16)), "tp1": (4, 5, 6, 7)}
    records = {rank: record({"0": 4}, ("0", 4)) for rank in range(16)}
    records |= {rank: record({"0": 3, "tp1": 8}, ("tp1", 8)) for rank in (4, 5, 6, 7)}

    verdict = judge_hang(of_records(records, groups), topology)

    assert (verdict.conclusion, verdict.machines) == (HangConclusion.OVER_EVICTS, (4, 5, 6, 7))


def test_records_of_different_moments_are_no_stuck_collective() -> None:
    topology = Topology.of(16, 1, tp=4)
    groups = {"tp1": (4, 5, 6, 7)}
    records = {rank: record({"tp1": 8}, ("tp1", 8)) for rank in (4, 5, 6)} | {7: record({"tp1": 9})}
    assert judge_hang(of_records(records, groups), topology).conclusion is HangConclusion.UNKNOWN


def test_the_rank_that_skipped_a_collective_is_named() -> None:
    """Rank 5 skipped its dp collective. Rank 7 waits for it there, and all other ranks wait for 7 in the next one."""
    topology = Topology.of(4, 2, tp=2, pp=2)
    groups = {"0": tuple(range(8)), "d0": (0, 2), "d1": (1, 3), "d2": (4, 6), "d3": (5, 7)}
    own = {rank: group for group, ranks in groups.items() if group != "0" for rank in ranks}
    records = {rank: record({own[rank]: 6, "0": 6}, ("0", 6), order=[own[rank], "0"]) for rank in range(8)}
    records[5] = record({"d3": 5, "0": 6}, ("0", 6), order=["d3", "0", "0"])
    records[7] = record({"d3": 6, "0": 5}, ("d3", 6), order=["d3", "0", "d3"])

    verdict = judge_hang(of_records(records, groups), topology)

    assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, (5,))


def test_a_wrong_order_of_all_ranks_is_not_a_machine() -> None:
    groups = {"a": tuple(range(8)), "b": tuple(range(8))}
    records = {rank: record({"a": 4 - rank % 2, "b": 3 + rank % 2}, ("ab"[rank % 2], 4)) for rank in range(8)}
    verdict = judge_hang(of_records(records, groups), EIGHT)
    assert (verdict.conclusion, verdict.machines) == (HangConclusion.NOT_A_MACHINE, ())


def calls(operations: dict[int, str]) -> JobSamples:
    return JobSamples(
        {
            rank: RankSample(record=CommunicationRecord({"0": 9}, (PendingOperation("0", 9, operation),)))
            for rank, operation in operations.items()
        },
        WORLD,
    )


def test_different_operations_in_one_collective() -> None:
    half = calls({rank: ("all_reduce", "broadcast")[rank % 2] for rank in range(8)})
    assert judge_hang(half, EIGHT).conclusion is HangConclusion.NOT_A_MACHINE

    one = judge_hang(calls(dict.fromkeys(range(8), "all_reduce") | {6: "broadcast"}), EIGHT)
    assert (one.conclusion, one.ranks) == (HangConclusion.NAMES, (6,))


def test_ranks_that_progressed_are_not_hung() -> None:
    evidence = of_stacks(dict.fromkeys(range(8), SYNC) | {5: STUCK})
    moving = JobSamples(evidence.ranks, moved=frozenset({1, 2}))
    assert judge_hang(moving, EIGHT).conclusion is HangConclusion.NOT_HUNG

    spins = JobSamples(evidence.ranks, moved=frozenset({5}))
    assert judge_hang(spins, EIGHT).ranks == (5,)


def test_no_rank_is_named_in_a_job_that_computes() -> None:
    busy = dict.fromkeys(range(8), COMPUTES)
    for stacks in (busy, busy | {0: SYNC, 1: SYNC}):
        verdict = judge_hang(of_stacks(stacks), EIGHT, HangLimits(methods=(HangMethod.STATE, HangMethod.WAIT_FOR)))
        assert verdict.conclusion is HangConclusion.UNKNOWN


@pytest.mark.parametrize("blocked_in", ["", "sleep", "socket"])
def test_a_rank_that_waits_for_something_outside_of_the_job_is_not_blamed(blocked_in: str) -> None:
    """If the rank waits for nothing outside of the job, e.g. for a lock of its own process, the same stack names it."""
    ranks = {rank: RankSample(SYNC) for rank in range(8)} | {5: RankSample(STUCK, blocked_in=blocked_in)}
    samples = JobSamples(ranks, moved=frozenset())
    verdict = judge_hang(samples, EIGHT)
    sign = check_hang(verdict, samples, {rank: RankWork(0.0, 0) for rank in range(8)}).sign
    expected = (False, HangSign.OUTSIDE) if blocked_in else (True, HangSign.QUIET)
    assert (verdict.evicts, sign) == expected
    assert blocked_in in verdict.reason


def test_a_collective_is_not_outside_of_the_job() -> None:
    """Gloo may poll its sockets in the rank's main thread, so this does not count as outside of the job."""
    ranks = {rank: RankSample(SYNC, blocked_in="poll") for rank in range(8)} | {5: RankSample(STUCK)}
    assert judge_hang(JobSamples(ranks, moved=frozenset()), EIGHT).ranks == (5,)


def test_a_stopped_process_is_named() -> None:
    ranks = {rank: RankSample(SYNC, is_stopped=rank == 2) for rank in range(8)}
    verdict = judge_hang(JobSamples(ranks), EIGHT)
    assert (verdict.method, verdict.ranks) == (HangMethod.STATE, (2,))


@pytest.mark.parametrize("topology", [Topology.of(1, 4), Topology.of(1, 1)], ids=str)
def test_a_job_of_which_all_ranks_are_stopped_is_paused(topology: Topology) -> None:
    ranks = {rank: RankSample(SYNC if rank else COMPUTES, is_stopped=True) for rank in range(topology.world_size)}
    verdict = judge_hang(JobSamples(ranks, moved=frozenset(), is_hung=True), topology)
    assert (verdict.conclusion, verdict.machines) == (HangConclusion.UNKNOWN, ())
    assert "on purpose" in verdict.reason


def test_two_faults_at_once_are_both_named_and_many_are_not() -> None:
    sixteen = Topology.of(16, 1)
    stacks = dict.fromkeys(range(16), SYNC)
    assert judge_hang(of_stacks(stacks | {2: STUCK, 9: STUCK}), sixteen).ranks == (2, 9)

    verdict = judge_hang(of_stacks(stacks | dict.fromkeys(range(5), STUCK)), sixteen)
    assert (verdict.conclusion, verdict.machines) == (HangConclusion.UNKNOWN, ())


def test_the_limits_choose_the_methods() -> None:
    """The wait-for graph names the rank. With stack outliers alone, its group is over-evicted."""
    topology = Topology.parse(FIGURE_7)
    stacks = figure_7() | {30: STUCK}
    assert judge_hang(of_stacks(stacks), topology).machines == (15,)
    only_stacks = judge_hang(of_stacks(stacks), topology, HangLimits(methods=(HangMethod.STACKS,)))
    assert only_stacks.machines == (12, 13, 14, 15)


def test_a_neighbour_that_frames_do_not_show_is_not_guessed() -> None:
    """torch's pipelining waits for both neighbours in one function, so the stack does not show for which one."""
    topology = Topology.of(16, 1, pp=4)
    p2p = stack("train", "step", "_wait_batch_p2p@torch/distributed/pipelining/schedules.py")
    first = topology.group(0, "pp")
    stacks = {rank: SYNC if rank not in first else p2p for rank in range(16)}

    verdict = judge_hang(of_stacks(stacks), topology)

    assert verdict.conclusion is HangConclusion.OVER_EVICTS
    assert verdict.machines == first


@pytest.mark.parametrize("culprit", [0, 7, 21, 31])
@settings(max_examples=20)
@given(order=st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_the_order_of_ranks(culprit: int, order: object) -> None:
    topology = Topology.parse(FIGURE_7)
    stacks = dict.fromkeys(range(32), SYNC) | {culprit: stack("train", "load", f"read@{TORCH}")}
    ranks = list(range(32))
    order.shuffle(ranks)  # type: ignore[attr-defined]

    assert judge_hang(of_stacks({rank: stacks[rank] for rank in ranks}), topology) == judge_hang(
        of_stacks(stacks), topology
    )
    assert judge_hang(of_stacks(stacks), topology).ranks == (culprit,)


@pytest.mark.parametrize(("machines", "expected"), [(4, (1, 3)), (3, ())])
def test_two_faults_at_once_are_both_named_in_a_job_of_four_machines(machines: int, expected: tuple[int, ...]) -> None:
    topology = Topology.of(machines, 2)
    stacks = dict.fromkeys(range(topology.world_size), SYNC) | dict.fromkeys((2, 2 * machines - 1), STUCK)

    verdict = judge_hang(of_stacks(stacks), topology)

    assert verdict.machines == expected, verdict.reason
    if expected:
        assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, (2, 7))
