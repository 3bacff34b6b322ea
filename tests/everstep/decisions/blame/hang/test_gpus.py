"""Hangs of GPUs: which machine the flight records of NCCL name, and which they must not name."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.decisions.blame.hang.wait_for import wait_graph
from everstep.model.hang import HangConclusion
from everstep.model.topology import Topology
from tests.everstep.decisions.blame.hang.simulated_gpus import Faults, SimulatedGpus

TOPOLOGY = Topology.of(16, 4, tp=4, pp=4)
"""Replicas of 16 ranks, each stage of a replica on one machine."""
STEP = len(SimulatedGpus(TOPOLOGY).program(0)) // 2
"""Number of operations of the first stage in a step."""
culprits = st.integers(0, TOPOLOGY.world_size - 1)
timings = st.booleans()


def step_of(rank: int) -> int:
    return len(SimulatedGpus(TOPOLOGY).program(rank)) // 2


@settings(max_examples=15)
@given(culprit=culprits, at=st.integers(0, STEP - 1), has_timing=timings)
def test_a_rank_that_stops_is_named(culprit: int, at: int, has_timing: bool) -> None:
    """Wherever a rank stops, its machine is named, although the other ranks have enqueued operations far ahead."""
    faults = Faults(stops_before={culprit: step_of(culprit) + at})
    verdict = judge_hang(SimulatedGpus(TOPOLOGY, faults, has_timing=has_timing).run().samples(), TOPOLOGY)
    assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, (culprit,)), verdict.reason


@settings(max_examples=15)
@given(culprit=culprits, at=st.integers(0, STEP - 4), has_timing=timings)
def test_a_kernel_that_never_ends_leads_to_the_machine_of_its_rank(culprit: int, at: int, has_timing: bool) -> None:
    """No rank is missing. A collective within one machine names this machine; another names all of its machines."""
    job = SimulatedGpus(TOPOLOGY, Faults(never_ends={culprit: step_of(culprit) + at}), has_timing=has_timing).run()
    verdict = judge_hang(job.samples(), TOPOLOGY)
    assert TOPOLOGY.machine(culprit) in verdict.machines, verdict.reason
    if not job.programs[culprit][step_of(culprit) + at].is_p2p:
        assert verdict.machines == (TOPOLOGY.machine(culprit),)


@settings(max_examples=8)
@given(culprit=culprits, has_timing=timings)
def test_a_collective_that_all_peers_have_finished_names_the_rank_that_has_not(culprit: int, has_timing: bool) -> None:
    """The GPU does not finish the collective of all ranks at the end of the first step."""
    faults = Faults(never_ends={culprit: step_of(culprit) - 1}, alone=True)
    verdict = judge_hang(SimulatedGpus(TOPOLOGY, faults, has_timing=has_timing).run().samples(), TOPOLOGY)
    assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, (culprit,)), verdict.reason


@settings(max_examples=15)
@given(culprit=culprits, at=st.integers(0, STEP - 2), has_timing=timings)
def test_a_collective_that_one_rank_skips_is_not_blamed_on_the_script(culprit: int, at: int, has_timing: bool) -> None:
    skipped = step_of(culprit) + at
    faults = Faults(skips={culprit: skipped})
    if SimulatedGpus(TOPOLOGY).program(culprit)[skipped].is_p2p:
        return
    verdict = judge_hang(SimulatedGpus(TOPOLOGY, faults, has_timing=has_timing).run().samples(), TOPOLOGY)
    assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, (culprit,)), verdict.reason


@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30), share=st.floats(0.05, 0.95), has_timing=timings)
def test_one_sample_of_a_running_job_blames_nobody(seed: int, share: float, has_timing: bool) -> None:
    """Operations in several places have all of their ranks. So nothing shows that the job hangs."""
    job = SimulatedGpus(TOPOLOGY, has_timing=has_timing)
    operations = sum(map(len, job.programs.values()))
    samples = job.run(int(operations * share), random.Random(seed)).samples()
    ready = [one for one in wait_graph(samples, TOPOLOGY).collectives if one.is_stuck]
    assume(len(ready) > 1 and not set(ready[0].entered).intersection(*(one.entered for one in ready)))
    verdict = judge_hang(samples, TOPOLOGY)
    assert verdict.conclusion is HangConclusion.UNKNOWN, verdict.reason


@pytest.mark.parametrize("share", [0.25, 0.5])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 30), culprit=culprits, at=st.integers(0, STEP - 1))
def test_records_that_are_missing_blame_nobody_else(share: float, seed: int, culprit: int, at: int) -> None:
    ranks = [rank for rank in range(TOPOLOGY.world_size) if rank != culprit]
    unknown = frozenset(random.Random(seed).sample(ranks, int(len(ranks) * share)))
    job = SimulatedGpus(TOPOLOGY, Faults(stops_before={culprit: step_of(culprit) + at})).run()
    verdict = judge_hang(job.samples(unknown), TOPOLOGY)
    assert set(verdict.machines) <= {TOPOLOGY.machine(culprit)}, verdict.reason


def test_an_order_that_differs_on_half_of_the_ranks_is_the_script() -> None:
    odd = {rank for rank in range(TOPOLOGY.world_size) if TOPOLOGY.group(rank, "dp").index(rank) % 2}
    for swaps, expected in ((frozenset(odd), HangConclusion.NOT_A_MACHINE), (frozenset({21}), HangConclusion.NAMES)):
        verdict = judge_hang(SimulatedGpus(TOPOLOGY, Faults(swaps=swaps)).run().samples(), TOPOLOGY)
        assert verdict.conclusion is expected, verdict.reason
    assert verdict.ranks == (21,)


def test_two_ranks_that_stop_are_both_named() -> None:
    first, second = 21, 29
    faults = Faults(stops_before={first: step_of(first) + 4, second: step_of(second) + 7})
    verdict = judge_hang(SimulatedGpus(TOPOLOGY, faults).run().samples(), TOPOLOGY)
    assert verdict.machines == (TOPOLOGY.machine(first), TOPOLOGY.machine(second)), verdict.reason
