"""A machine whose ranks end repeatedly with an error of its hardware."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from everstep.decisions.blame.repeated_errors import REPEATS, findings_of_errors
from everstep.model.evidence import Classification, RankExit
from everstep.model.finding import Remedy
from everstep.model.incident import Failure, Symptom
from everstep.model.ladder import Rung

ECC = Classification(fault="gpu memory", owner="machine", reason="cuda-ecc")
CODE = Classification(fault="user error", owner="code", reason="python-exception")
PEER = ECC.model_copy(update={"consequence": True})
NETWORK = Classification(fault="infiniband", owner="network", reason="ibv-failed")
ALL = {Rung.DIAGNOSE, Rung.REATTEMPT}


def end(found: Classification | None = ECC) -> RankExit:
    return RankExit(rank=3, machine="m1", code=1, exception="AcceleratorError: ECC", classification=found)


def failed(
    machine: str = "m1", found: Classification | None = ECC, *, explained: bool = False, generation: int = 2
) -> Failure:
    return Failure(
        generation=generation,
        step=9,
        symptom=Symptom.EXCEPTION,
        cause="AcceleratorError",
        machine=machine,
        classification=found,
        explained=explained,
    )


TWICE = [failed(generation=number) for number in range(1, REPEATS)]


def test_the_third_error_of_one_machine_that_no_test_found_names_it() -> None:
    [about] = findings_of_errors(end(), TWICE, ALL)
    assert (about.machine, about.finding.reason, about.finding.sure) == ("m1", "repeated-errors", False)


def test_errors_of_the_network_count_too_and_do_not_ask_for_a_reset_of_the_gpu() -> None:
    [about] = findings_of_errors(end(NETWORK), [failed(generation=1), failed(found=NETWORK, generation=2)], ALL)
    assert (about.machine, about.finding.remedy) == ("m1", Remedy.REPLACE)


@pytest.mark.parametrize(
    ("last", "earlier", "tried"),
    [
        (end(), TWICE[1:], ALL),
        (end(), [failed()] * 4, ALL),
        (end(), [failed(), failed("m2")], ALL),
        (end(), [*TWICE, failed("m2")], ALL),
        (end(), [failed(), failed(explained=True)], ALL),
        (end(), [failed(generation=1), failed("m2", NETWORK)], ALL),
        (end(), [failed(), failed(found=CODE)], ALL),
        (end(CODE), TWICE, ALL),
        (end(PEER), TWICE, ALL),
        (end(None), TWICE, ALL),
        (None, TWICE, ALL),
        (end(), TWICE, {Rung.REATTEMPT}),
    ],
    ids=[
        *(
            "twice",
            "one generation, kept several times",
            "another machine",
            "another machine too",
            "a machine left",
            "an error of the network of another machine",
            "its code before",
            "its code now",
        ),
        *("a victim", "not classified", "no rank ended", "not tested"),
    ],
)
def test_nobody_is_named(last: RankExit | None, earlier: Sequence[Failure], tried: set[Rung]) -> None:
    assert findings_of_errors(last, earlier, tried) == []
