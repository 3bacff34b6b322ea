"""The disk test writes a file to the disk of the agent's state folder, reads it back and compares it."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import hardware
from everstep.base.text import size_text
from everstep.errors import CannotInspect
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Reason, Remedy
from everstep.system.memory import free

DAMAGED = Reason("disk-damaged", "a disk returns other bytes than were written", remedy=Remedy.REPLACE, sure=True)
FAILS = Reason("disk-io-error", "a disk reports errors", remedy=Remedy.REPLACE, sure=True)
BLOCK = 1 << 22
LEAST_BYTES = BLOCK
"""Smallest size of the file, bytes."""


class DiskTestLimits(DiagnosticLimits):
    """Limits of the disk test."""

    mb: float = Field(default=128.0, gt=0)
    """Size of the file, megabytes."""
    share: float = Field(default=0.05, gt=0, le=0.5)
    """Largest share of the free space that is used, so that the test never fills a disk."""


class DiskTest(DiagnosticTest):
    """Writes a file, reads it back from the disk, and removes it."""

    name: ClassVar[Diagnostic] = Diagnostic.DISK
    does: ClassVar[str] = "writes a file to the disk of the state folder, reads it back and removes it"
    reasons: ClassVar[tuple[Reason, ...]] = (DAMAGED, FAILS)
    limits_type: ClassVar[type[DiagnosticLimits]] = DiskTestLimits

    def run(self) -> DiagnosticResult:
        """Test once."""
        folder = self.bench.folder
        blocks = int(min(self.limits.mb * 1e6, self.limits.share * free(folder))) // BLOCK
        if blocks * BLOCK < LEAST_BYTES:
            raise CannotInspect(f"{folder} has {size_text(free(folder))} free: a file of a useful size does not fit")
        try:
            return self._tested(folder, blocks)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return self.result(self.finding(FAILS, str(folder), str(error)))

    def _tested(self, folder: Path, blocks: int) -> DiagnosticResult:
        # The file never has a name, so a test that is killed leaves nothing behind.
        with tempfile.TemporaryFile(dir=folder) as file:
            descriptor = file.fileno()
            began = time.monotonic()
            for index in range(blocks):
                file.write(contents(index))
            file.flush()
            os.fsync(descriptor)
            write_s = time.monotonic() - began
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read from the disk
            read_s, wrong = 0.0, []
            buffer = mmap.mmap(-1, BLOCK)
            for index in range(blocks):
                began = time.monotonic()
                count = os.preadv(descriptor, [buffer], index * BLOCK)
                read_s += time.monotonic() - began
                if count != BLOCK or self.read(buffer, index) != contents(index):
                    wrong.append(f"block {index} of {blocks}, {count} bytes")
        if wrong:
            return self.result(self.finding(DAMAGED, str(folder), *wrong))
        size = blocks * BLOCK
        return self.result(
            kind=hardware(),
            measures={
                "verified_bytes": float(size),
                "write_bytes_per_second": size / write_s,
                "read_bytes_per_second": size / read_s,
            },
        )

    def read(self, buffer: mmap.mmap, index: int) -> bytes:
        """Return the bytes that were read of a block. Tests override it."""
        return buffer[:]


def contents(index: int) -> bytes:
    """Return the bytes of a block, which are different for each block."""
    return hashlib.shake_128(index.to_bytes(8, "little")).digest(1 << 16) * (BLOCK >> 16)
