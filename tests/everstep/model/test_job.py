"""Sizes of a job, as histories and other releases have them."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep.model.job import JobSpec
from everstep.model.topology import SHORT_ORDER

MESHES = st.lists(st.sampled_from(["pp", "dp", "tp", "cp", "dp_shard"]), min_size=1, max_size=4, unique=True)


def spec(**fields: object) -> JobSpec:
    return JobSpec.model_validate({"name": "job", "script": "/job.py", **fields})


@given(MESHES, st.lists(st.integers(1, 3), min_size=4, max_size=4), st.booleans())
def test_releases_that_know_no_mesh_read_the_same_sizes_or_refuse_the_job(
    axes: list[str], sizes: list[int], laid: bool
) -> None:
    """They read tp, pp and order, and refuse an order that does not name exactly these and dp."""
    mesh = dict(zip(axes, sizes, strict=False))
    groups = [f"ep=1:{axes[0]}"] if laid else []
    job = spec(machines=prod(mesh.values()), mesh=mesh, groups=groups)
    written = job.model_dump(mode="json")

    if sorted(written["order"]) == sorted(SHORT_ORDER):
        assert (written["mesh"], written["groups"]) == ([], [])
        assert (written["tp"], written["pp"]) == (mesh["tp"], mesh["pp"])
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert JobSpec.model_validate(written).topology() == job.topology()
    assert dict(job.topology().mesh) == mesh


def test_what_an_earlier_release_wrote_is_read() -> None:
    job = spec(machines=4, ranks_per_machine=2, tp=2, pp=2, order=["dp", "pp", "tp"])

    assert str(job.topology()) == "4,2,2,2,dp-pp-tp"


def test_an_order_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValidationError, match="order is pp-ep-dp-tp; it must name tp, pp and dp once each"):
        spec(order=["pp", "ep", "dp", "tp"])
