"""The sizes of a job stay the same when they are written and read."""

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
def test_a_job_is_written_and_read_without_change(axes: list[str], sizes: list[int], laid: bool) -> None:
    """A mesh of only tp, pp and dp is written in the short form."""
    mesh = dict(zip(axes, sizes, strict=False))
    groups = [f"ep=1:{axes[0]}"] if laid else []
    job = spec(machines=prod(mesh.values()), mesh=mesh, groups=groups)
    written = job.model_dump(mode="json")

    short = sorted(axes) == sorted(SHORT_ORDER) and not laid
    assert (written["mesh"] == []) is short
    if short:
        assert (written["tp"], written["pp"], written["order"]) == (mesh["tp"], mesh["pp"], axes)
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert JobSpec.model_validate(written).topology() == job.topology()
    assert dict(job.topology().mesh) == mesh


def test_the_short_form_has_an_order() -> None:
    job = spec(machines=4, ranks_per_machine=2, tp=2, pp=2, order=["dp", "pp", "tp"])

    assert str(job.topology()) == "4,2,2,2,dp-pp-tp"


def test_an_invalid_order_is_refused() -> None:
    with pytest.raises(ValidationError, match="order is pp-ep-dp-tp; it must name tp, pp and dp once each"):
        spec(order=["pp", "ep", "dp", "tp"])
