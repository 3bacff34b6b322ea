"""Bitwise alignment: the bits are the same in each run, and one wrong bit is found on any of the machines."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from agent.diagnoser.host.bitwise import UNSTEADY
from agent.diagnoser.reference.settings import ReferenceLimits
from everstep.decisions.blame.diagnose.diagnosis import judge
from everstep.model.diagnosis import DiagnosticResult
from everstep.model.finding import Health
from everstep.rank import environment
from tests.agent.diagnoser.forked import Run, forked_tests

QUICK = {"seconds": 0, "dim": 16, "layers": 2, "sequence": 8, "batch": 2}
MOE = {"moe": True, "tp": 1, "ep": 2, "experts": 2}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs tests; a machine computes wrong bits if its name is "wrong m0" to "wrong m3" or "now and then"."""
    folder = tmp_path_factory.mktemp("forked")
    flips: list[dict[str, object]] = [{"machine": f"wrong m{bad}"} for bad in range(4)]
    flips.append({"machine": "now and then", "probability": 0.5})
    plan = folder / "faults.json"
    plan.write_text(json.dumps([{"id": str(n), "fault": "bitflip", **one} for n, one in enumerate(flips)]))
    with pytest.MonkeyPatch.context() as patched, forked_tests(folder) as run:
        patched.setenv(environment.FAULTS, str(plan))
        yield run


@pytest.mark.parametrize(
    "structure", [{}, {"dtype": "float32"}, {"dtype": "float16"}, MOE, {"tp": 1, "pp": 1, "dp": 2}]
)
def test_the_same_structure_gives_the_same_bits_in_every_process(forked: Run, structure: dict[str, object]) -> None:
    one, two = (forked("bitwise", machine=machine, **QUICK | structure) for machine in ("m0", "m1"))

    assert one.findings == two.findings == []
    limits = ReferenceLimits.model_validate(QUICK | structure)
    assert len(one.digests) == 2 * limits.world_size
    assert (one.digests, one.kind) == (two.digests, two.kind)
    assert one.measures["steps"] == 2


def test_machines_with_other_structures_are_of_another_kind(forked: Run) -> None:
    one, two = forked("bitwise", **QUICK), forked("bitwise", **QUICK | {"dp": 1})
    assert one.kind != two.kind


@pytest.fixture(scope="module")
def sound(forked: Run) -> list[DiagnosticResult]:
    """The results of four machines that compute correctly."""
    return [forked("bitwise", machine=f"m{index}", **QUICK | {"pp": 1}) for index in range(4)]


@pytest.mark.parametrize("bad", range(4))
def test_each_of_four_machines_is_named_if_it_computes_a_wrong_bit(
    forked: Run, sound: list[DiagnosticResult], bad: int
) -> None:
    results = [*sound]
    results[bad] = forked("bitwise", machine=f"wrong m{bad}", **QUICK | {"pp": 1})
    found = judge({f"m{index}": [result] for index, result in enumerate(results)})

    assert found.faulty == [f"m{bad}"]
    [text] = [one.findings[0].text for one in found.machines if one.findings]
    assert text.startswith("other bits than 3 of 4 machines of its kind: rank 0 gradients")
    assert [one.verdict for one in found.machines].count(Health.HEALTHY) == 3


def test_a_machine_finds_its_own_sporadic_wrong_bit(forked: Run) -> None:
    found = forked("bitwise", machine="now and then", **QUICK | {"seconds": 3, "pp": 1})

    assert [one.reason for one in found.findings] == [UNSTEADY.code]
    assert found.findings[0].sure
    assert found.findings[0].evidence[0].startswith("rank 0: ")
