"""The memory that checkpoints need, and the error if a machine has too little of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.slots.file import SlotFile
from everstep.slots.footprint import footprint, refusal
from tests.shm import shm_folder

GB = 10**9


@settings(max_examples=20)
@given(size=st.integers(0, 5_000_000), slots=st.integers(2, 4))
def test_a_file_has_the_estimated_size(size: int, slots: int) -> None:
    with shm_folder() as folder:
        file = SlotFile(folder / "c", slots=slots)
        file.begin(b"", size)
        need = footprint((size + 63) // 64 * 64, 1, slots, 0)
        assert (need.own, need.backups, need.total) == ((folder / "c").stat().st_size, 0, need.own)
        file.close()


def test_backups_need_additional_memory() -> None:
    need = footprint(GB, 4, 3, 2)
    assert need.own > 12 * GB and need.backups > 8 * GB
    assert need.total == need.own + need.backups
    assert footprint(GB, 4, 3, 0).total == need.own


@given(
    state=st.integers(0, 1 << 40), ranks=st.integers(1, 16), shm=st.integers(0, 1 << 46), memory=st.integers(0, 1 << 46)
)
def test_a_footprint_is_refused_only_if_it_does_not_fit(state: int, ranks: int, shm: int, memory: int) -> None:
    need = footprint(state, ranks, 3, 2)
    assert bool(refusal(need, shm, memory, "m0")) == (need.total > min(shm, memory))


@pytest.mark.parametrize(
    ("shm", "memory", "says", "advises"),
    [
        (15 * GB, 90 * GB, "but /dev/shm has 15.00 GB.", "size=19G /dev/shm), turn backups off, use fewer slots or"),
        (90 * GB, 2 * GB, "but 2.00 GB of memory are available.", "use fewer slots or shard the state over more ranks"),
        (
            3 * GB,
            10**6,
            "but /dev/shm has 3.00 GB and 1.0 MB of memory are available.",
            "docker: --shm-size=19g; Kubernetes: emptyDir with medium: Memory and sizeLimit: 19Gi; elsewhere: mount",
        ),
    ],
)
def test_a_refusal_has_all_numbers_and_names_remedies(shm: int, memory: int, says: str, advises: str) -> None:
    text = refusal(footprint(GB, 4, 3, 2), shm, memory, "machine m2")
    assert "on machine m2: 4 ranks with 1.00 GB of state each and 3 slots and 2 for a backup need 20.31 GB" in text
    assert "(12.19 GB for its own, 8.13 GB for backups)" in text
    assert says in text and advises in text
