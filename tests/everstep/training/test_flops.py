"""The FLOPs for one token come from the script, or from the number of the models' parameters.

The peak FLOPs of a GPU come from its name.
"""

from __future__ import annotations

import math

import pytest
import torch

import everstep
from everstep.errors import ConfigError
from everstep.rank.step_reports import Flops
from everstep.training.flops import peak_of, with_defaults
from tests.everstep.training.conftest import StartRank


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA RTX A1000", 0.0),
        ("", 0.0),
    ],
)
def test_the_peak_of_a_gpu_follows_from_its_name(name: str, peak: float) -> None:
    assert peak_of(name) == peak


def test_without_a_given_figure_it_is_derived_as_6_for_each_parameter(start_rank: StartRank) -> None:
    agent = start_rank()
    model = torch.nn.Linear(3, 4)
    everstep.join().checkpoint(model=model, again=model, optimizer=torch.optim.SGD(model.parameters()))
    assert agent.snapshot().flops == Flops(6.0 * 16, 0.0, derived=True)


def test_given_figures_are_used(start_rank: StartRank) -> None:
    agent = start_rank()
    everstep.join(flops_per_token=7e9, peak_flops=1e12).checkpoint(model=torch.nn.Linear(3, 4))
    assert agent.snapshot().flops == Flops(7e9, 1e12, derived=False)


def test_without_models_nothing_is_known(start_rank: StartRank) -> None:
    topology = everstep.join().topology if start_rank() else None
    assert topology is not None and with_defaults(Flops(), [object()], topology) == Flops()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_figure_is_refused(start_rank: StartRank, value: float) -> None:
    start_rank()
    with pytest.raises(ConfigError, match="must be above 0"):
        everstep.join(flops_per_token=value)
