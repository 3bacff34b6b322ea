"""The verdicts on recordings of real jobs on gloo. ``record_stacks.py`` made the recordings."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.decisions.blame.hang.conclusions import HangLimits
from everstep.decisions.blame.hang.rank_samples import JobSamples
from everstep.dumps.folder import read_folder
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.topology import Topology
from tests.everstep.decisions.blame.hang.made import FIGURE_7

RECORDED = Path(__file__).resolve().parents[4] / "data" / "hangs"
NAMES, OVER = HangConclusion.NAMES, HangConclusion.OVER_EVICTS


def unpacked(name: str, folder: Path) -> tuple[Path, Topology, int]:
    """Unpack a recording. Returns its folder, its topology and the rank at fault."""
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    about = json.loads((folder / ".about.json").read_text())
    return folder, Topology.parse(about["topology"]), about["fault"]["rank"]


def read(name: str, folder: Path) -> tuple[JobSamples, Topology, int]:
    path, topology, rank = unpacked(name, folder)
    return read_folder(path, pickles=name.startswith("flight-records")), topology, rank


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("stop", HangMethod.STATE),
        ("deadlock", HangMethod.WAIT_FOR),
        ("skip", HangMethod.WAIT_FOR),
        ("loader", HangMethod.WAIT_FOR),
        ("gil", HangMethod.WAIT_FOR),
        ("spin", HangMethod.WAIT_FOR),
        ("flight-records-16", HangMethod.WAIT_FOR),
    ],
)
def test_the_rank_is_named(name: str, method: HangMethod, tmp_path: Path) -> None:
    evidence, topology, culprit = read(name, tmp_path)

    verdict = judge_hang(evidence, topology)

    assert (verdict.conclusion, verdict.method, verdict.ranks) == (NAMES, method, (culprit,)), verdict.reason
    assert verdict.machines == (topology.machine(culprit),)


def test_the_reason_names_the_data_loader(tmp_path: Path) -> None:
    evidence, topology, _ = read("loader", tmp_path)
    assert "its data loader's process is in read_remote_shard" in judge_hang(evidence, topology).reason


@pytest.mark.parametrize("name", ["healthy", "healthy-pp4", "evaluation"])
def test_a_healthy_job_is_not_hung(name: str, tmp_path: Path) -> None:
    evidence, topology, _ = read(name, tmp_path)
    verdict = judge_hang(evidence, topology)
    assert (verdict.conclusion, verdict.machines) == (HangConclusion.NOT_HUNG, ()), verdict.reason


@pytest.mark.parametrize("name", ["healthy", "healthy-pp4", "evaluation"])
@pytest.mark.parametrize("look", [1, 2])
def test_one_sample_of_a_healthy_job_evicts_no_machine(name: str, look: int, tmp_path: Path) -> None:
    path, topology, _ = unpacked(name, tmp_path)
    verdict = judge_hang(read_folder(path / f"snapshot-{look}"), topology)
    assert verdict.machines == (), verdict.reason


def test_the_scripts_own_order_is_not_a_machine(tmp_path: Path) -> None:
    evidence, topology, _ = read("order", tmp_path)
    verdict = judge_hang(evidence, topology)
    assert (verdict.conclusion, verdict.machines) == (HangConclusion.NOT_A_MACHINE, ()), verdict.reason


def test_records_without_p2p_over_evict_the_pipeline(tmp_path: Path) -> None:
    """Gloo does not record point-to-point operations. So the records of a pipeline do not show which rank waits."""
    evidence, topology, culprit = read("flight-records-pp4", tmp_path)
    verdict = judge_hang(evidence, topology)
    assert verdict.conclusion is OVER
    assert topology.machine(culprit) in verdict.machines
    assert len(verdict.machines) == topology.machines // 2


@pytest.mark.parametrize("name", ["stop", "deadlock", "loader", "gil", "spin"])
def test_stack_outliers_alone_over_evict_the_pipeline_of_the_culprit(name: str, tmp_path: Path) -> None:
    evidence, topology, culprit = read(name, tmp_path)

    verdict = judge_hang(evidence, topology, HangLimits(methods=(HangMethod.STACKS,)))

    assert verdict.conclusion is OVER
    assert verdict.group is not None
    assert verdict.group.kind == "pp"
    assert topology.machine(culprit) in verdict.machines


def test_stacks_without_records_name_the_rank_that_delays_itself(tmp_path: Path) -> None:
    evidence, topology, culprit = read("gil", tmp_path)
    stacks = {rank: replace(one, record=None) for rank, one in evidence.ranks.items()}
    assert judge_hang(replace(evidence, ranks=stacks), topology).ranks == (culprit,)


def test_recordings_are_small() -> None:
    sizes = [path.stat().st_size for path in RECORDED.glob("*.tar.xz")]
    assert len(sizes) == 12
    assert sum(sizes) < 300_000


def test_figure_7_by_recorded_stacks_of_half_as_many_ranks(tmp_path: Path) -> None:
    """The recorded job has 16 ranks and hangs in the backward pass. Its healthy replica is used three times."""
    evidence, small, culprit = read("deadlock", tmp_path)
    large, ill = Topology.parse(FIGURE_7), small.coordinate(culprit)["dp"]
    ranks = {}
    for rank in range(large.world_size):
        place = large.coordinate(rank)
        source = small.rank_at(pp=place["pp"], dp=ill if place["dp"] == 3 else 1 - ill, tp=place["tp"])
        ranks[rank] = replace(evidence.of(source), record=None)
    scaled = JobSamples(ranks, is_hung=True)
    there = large.rank_at(pp=small.coordinate(culprit)["pp"], dp=3, tp=small.coordinate(culprit)["tp"])

    named = judge_hang(scaled, large)
    assert (named.conclusion, named.ranks) == (NAMES, (there,)), named.reason

    paper = judge_hang(scaled, large, HangLimits(methods=(HangMethod.STACKS,)))
    assert (paper.conclusion, paper.machines, paper.innocent) == (OVER, (12, 13, 14, 15), 0)
    assert paper.group is not None and paper.group.kind == "pp"
