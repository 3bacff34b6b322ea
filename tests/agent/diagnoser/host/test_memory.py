"""The memory test names each address that returns another value than was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent.diagnoser.diagnostic import Bench
from agent.diagnoser.host.memory import DAMAGED, MemoryTest, MemoryTestLimits, differences, patterns
from everstep.model.finding import Health

if TYPE_CHECKING:
    from agent.diagnoser.host.memory import Words64

SMALL = MemoryTestLimits(mb=2, seconds=0.001)


class StuckBit(MemoryTest):
    """A test of a memory in which one bit is always 1."""

    def write(self, block: Words64, expected: Words64) -> None:
        super().write(block, expected)
        block[1000] |= np.uint64(1 << 40)


def test_memory_that_works_is_measured() -> None:
    found = MemoryTest(Bench("m0"), SMALL).run()

    assert found.verdict is Health.HEALTHY
    assert found.measures["tested_bytes"] == 2e6
    assert found.measures["verified_bytes"] >= 6 * 2e6
    assert found.measures["write_bytes_per_second"] > 0


def test_a_stuck_bit_is_found_with_its_address() -> None:
    found = StuckBit(Bench("m0"), SMALL).run()

    assert [one.reason for one in found.findings] == [DAMAGED.code]
    assert found.findings[0].sure
    assert found.findings[0].evidence == ["byte 8000: wrote 0x0000000000000000, read 0x0000010000000000"]


@given(st.lists(st.integers(0, 999), min_size=1, unique=True), st.integers(0, 63))
def test_every_flipped_bit_is_a_difference_in_every_pattern(places: list[int], bit: int) -> None:
    for _, expected in patterns(1000, 1):
        block = np.array(expected)
        assert differences(block, expected) == []
        block[places] ^= np.uint64(1 << bit)
        assert len(differences(block, expected)) == min(3, len(places))
        assert differences(block, expected)[0].startswith(f"byte {8 * min(places)}: ")
