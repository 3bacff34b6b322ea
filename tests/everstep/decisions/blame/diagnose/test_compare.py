"""The comparison of bits: the majority of machines of a kind is right. Without a majority, no machine is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.diagnose.compare import Computed, compare


def computed(*bits: str, kind: str = "cpu") -> dict[str, Computed]:
    return {f"m{index}": Computed(kind, {"gradients": one}) for index, one in enumerate(bits)}


def test_if_two_machines_differ_none_is_named() -> None:
    assert [compared.agrees for compared in compare(computed("a", "b")).values()] == [None, None]


def test_the_differing_results_are_named() -> None:
    right = {f"rank {rank} {what}": "a" for rank in range(3) for what in ("gradients", "parameters")}
    machines = {f"m{index}": Computed("cpu", right) for index in range(3)}
    machines["m1"] = Computed("cpu", right | {"rank 2 gradients": "b", "rank 2 parameters": "c"})
    found = compare(machines)

    assert [one.agrees for one in found.values()] == [True, False, True]
    assert found["m1"].text == "other bits than 2 of 3 machines of its kind: rank 2 gradients, rank 2 parameters"


def test_machines_of_different_kinds_are_not_compared() -> None:
    found = compare(computed("a", "a", "a") | {"h200": Computed("other", {"gradients": "b"})})

    assert [one.agrees for one in found.values()] == [True, True, True, None]


def test_a_machine_that_computed_less_than_the_others_differs() -> None:
    found = compare(computed("a", "a", "a") | {"m1": Computed("cpu", {})})

    assert found["m1"].agrees is False


@given(st.lists(st.sampled_from("aabc"), min_size=1, max_size=12), st.lists(st.sampled_from("xy"), min_size=12))
def test_a_named_machine_differs_from_a_majority_of_its_kind(bits: list[str], kinds: list[str]) -> None:
    machines = {f"m{n}": Computed(kind, {"x": bit}) for n, (bit, kind) in enumerate(zip(bits, kinds, strict=False))}
    for machine, said in compare(machines).items():
        alike = [one.digests["x"] for one in machines.values() if one.kind == machines[machine].kind]
        own = machines[machine].digests["x"]
        majority = [bit for bit in set(alike) if alike.count(bit) * 2 > len(alike)]
        assert said.agrees == (own in majority if majority and len(alike) > 1 else None)
