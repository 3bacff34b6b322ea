"""Writes the launch and the first step of a generation into the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.model.launch import Confirmation, Launched

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger


def write_generation(ledger: Ledger, job: str, launched: Launched | None, confirmation: Confirmation | None) -> None:
    """Write the known times of a generation."""
    if launched is not None:
        ledger.generation_launched(
            job,
            launched.generation,
            resume_step=launched.resume_step,
            launched_ns=launched.started_ns,
            forked_ns=launched.forked_ns,
            reason=f"backups: {launched.backups}" if launched.backups else "",
        )
    if confirmation is not None and confirmation.ok:
        ledger.generation_stepped(job, confirmation.generation, stepped_ns=confirmation.stepped_ns)
