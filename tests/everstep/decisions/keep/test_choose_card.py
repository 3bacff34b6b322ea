"""Which network card carries the state of a rank, how fast, and when backups need a decision of the operator."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.choose_card import Card, Device, card_of, why_not_backed_up


def device(path: str, numa: int = -1) -> Device:
    return Device(PurePath(path), numa)


GPUS = [device(f"pci0000:{n}5/0000:{n}5:01.0/0000:{n}6:00.0/0000:{n}7:00.0", n // 4) for n in range(8)]
"""GPUs of a node, each on a PCI switch of its own, four on each NUMA node."""


def on_switch(number: int) -> Card:
    return Card(
        f"ib{number}",
        f"10.1.{number}.1",
        400_000,
        device(f"pci0000:{number}5/0000:{number}5:01.0/0000:{number}6:00.0/0000:{number}8:00.0", number // 4),
    )


@given(st.permutations(range(8)))
def test_each_gpu_uses_the_card_on_its_own_switch_whatever_the_order_of_the_cards(order: list[int]) -> None:
    cards = [on_switch(number) for number in order]
    assert [cards[card_of(local, cards, GPUS)].name for local in range(8)] == [f"ib{n}" for n in range(8)]


def test_gpus_that_share_cards_take_them_in_turn() -> None:
    """Two cards on each NUMA node, on no switch of a GPU."""
    cards = [Card(f"eth{n}", device=device(f"pci0000:f{n}/0000:f{n}:00.0", n // 2)) for n in range(4)]
    assert [card_of(local, cards, GPUS) for local in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]


@given(st.integers(1, 9), st.integers(0, 20), st.booleans())
def test_without_known_positions_the_cards_are_taken_in_turn(count: int, local: int, gpus: bool) -> None:
    cards = [Card(f"eth{n}") for n in range(count)]
    assert card_of(local, cards, GPUS if gpus else []) == local % count


@given(st.integers(1, 8), st.lists(st.integers(-1, 1), min_size=1, max_size=8), st.data())
def test_cards_that_are_equally_near_get_equally_many_gpus(count: int, numas: list[int], data: st.DataObject) -> None:
    gpus = [device(f"pci0000:{index:02}/0000:{index:02}:00.0", numa) for index, numa in enumerate(numas)]
    node = data.draw(st.integers(-1, 1))
    cards = [Card(f"eth{n}", device=device(f"pci0000:f{n}/0000:f{n}:00.0", node)) for n in range(count)]
    used = Counter(card_of(local, cards, gpus) for local in range(len(gpus)))
    assert set(used) <= set(range(count))
    assert max(used.values()) - min(used[index] for index in range(count)) <= 1


def test_a_rank_beyond_the_known_gpus_still_has_a_card() -> None:
    cards = [on_switch(0), on_switch(1)]
    assert card_of(9, cards, GPUS[:2]) == 1


@pytest.mark.parametrize(
    ("speed_mbit", "share", "bytes_per_s"), [(400_000, 0.25, 12.5e9), (400_000, 0.0, 0.0), (0, 0.25, 0.0)]
)
def test_backups_may_use_a_share_of_a_known_speed(speed_mbit: int, share: float, bytes_per_s: float) -> None:
    assert Card("ib0", speed_mbit=speed_mbit).backup_bytes_per_s(share) == bytes_per_s


def test_the_management_card_is_not_used_unasked_if_there_are_others() -> None:
    management = Card("eth0", "10.0.4.17", 1000)
    told = why_not_backed_up(management, ["ib0", "ib1"])
    assert "--data-cards ib0,ib1" in told
    assert "--data-cards eth0 to use eth0" in told
    assert not why_not_backed_up(management, [])
    assert not why_not_backed_up(Card("lo", loopback=True), ["eth0"])
    assert not why_not_backed_up(None, ["eth0"]), "the card with the agent's address is not known"
