"""The memory test writes patterns into memory, and reads them back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import hardware
from everstep.base.text import size_text
from everstep.errors import CannotInspect
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Reason, Remedy
from everstep.system.memory import memory_available

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words64 = NDArray[np.uint64]

DAMAGED = Reason("memory-damaged", "memory returns other bytes than were written", remedy=Remedy.REPLACE, sure=True)
LEAST_BYTES = 1 << 20
"""Smallest amount of memory that is tested, bytes."""
PART = 1 << 20
"""Number of words that are compared at a time, which limits the memory for the comparison itself."""
NAMED = 3
"""Largest number of wrong addresses that are named."""
FIXED = (0, 0xFFFF_FFFF_FFFF_FFFF, 0x5555_5555_5555_5555, 0xAAAA_AAAA_AAAA_AAAA)


class MemoryTestLimits(DiagnosticLimits):
    """Limits of the memory test."""

    mb: float = Field(default=256.0, gt=0)
    """Amount of memory that is allocated and tested, megabytes."""
    share: float = Field(default=0.1, gt=0, le=0.5)
    """Largest share of the available memory that is tested."""
    seconds: float = Field(default=2.0, gt=0)
    """The patterns are repeated for this long, seconds; each one is written at least once."""


class MemoryTest(DiagnosticTest):
    """Writes patterns into memory, and reads them back."""

    name: ClassVar[Diagnostic] = Diagnostic.MEMORY
    does: ClassVar[str] = "writes patterns into memory and reads them back"
    reasons: ClassVar[tuple[Reason, ...]] = (DAMAGED,)
    limits_type: ClassVar[type[DiagnosticLimits]] = MemoryTestLimits

    def run(self) -> DiagnosticResult:
        """Test once."""
        import numpy as np

        size = int(min(self.limits.mb * 1e6, self.limits.share * memory_available()))
        if size < LEAST_BYTES:
            raise CannotInspect(f"only {size_text(size)} of memory could be tested")
        block = np.empty(size // 8, dtype=np.uint64)
        ends, written, rounds, fastest = time.monotonic() + self.limits.seconds, 0, 0, 0.0
        while rounds == 0 or time.monotonic() < ends:
            for name, expected in patterns(len(block), rounds):
                began = time.monotonic()
                self.write(block, expected)
                fastest = max(fastest, block.nbytes / (time.monotonic() - began))
                if wrong := differences(block, expected):
                    return self.result(self.finding(DAMAGED, "", *wrong, text=f"{DAMAGED.means}: pattern {name}"))
                written += block.nbytes
            rounds += 1
        return self.result(
            kind=hardware(),
            measures={
                "tested_bytes": float(block.nbytes),
                "verified_bytes": float(written),
                "write_bytes_per_second": fastest,
            },
        )

    def write(self, block: Words64, expected: Words64) -> None:
        """Fill a block with a pattern. Tests override it."""
        block[:] = expected


def patterns(words: int, seed: int) -> Iterator[tuple[str, Words64]]:
    """Yield the name and the words of each pattern; the last two depend on the round (``seed``)."""
    import numpy as np

    for value in FIXED:
        yield f"{value:#x}", np.broadcast_to(np.uint64(value), words)
    yield "addresses", np.arange(words, dtype=np.uint64) ^ np.uint64(seed)
    yield "random", np.random.default_rng(seed).integers(0, 1 << 64, words, dtype=np.uint64)


def differences(block: Words64, expected: Words64) -> list[str]:
    """Describe the first differences between a block and the expected words."""
    import numpy as np

    lines: list[str] = []
    for begin in range(0, len(block), PART):
        part, wanted = block[begin : begin + PART], expected[begin : begin + PART]
        for index in np.flatnonzero(part != wanted)[: NAMED - len(lines)]:
            wrote, read = int(wanted[index]), int(part[index])
            lines.append(f"byte {8 * (begin + int(index))}: wrote {wrote:#018x}, read {read:#018x}")
        if len(lines) == NAMED:
            break
    return lines
