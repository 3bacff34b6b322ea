"""The bitwise test runs a step of a small model with the job's structure, which must give the same bits everywhere."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import arithmetic
from agent.diagnoser.ranks import OWN, WITHIN, Meeting, RanksFailed, listening, run_ranks
from agent.diagnoser.reference.settings import ReferenceLimits
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Health, Owner, Reason, Remedy

UNSTEADY = Reason(
    "bits-unsteady",
    "the same calculation does not give the same bits each time",
    remedy=Remedy.REPLACE,
    sure=True,
    source="ByteRobust, section 4.2",
)
FAILED = Reason(
    "reference-failed",
    "the reference model cannot be run",
    owner=Owner.UNKNOWN,
    remedy=Remedy.CHECK_SETUP,
    verdict=Health.UNKNOWN,
)
ROUNDS_NAMED = 8
"""Largest number of wrong steps that the evidence names."""


class BitwiseTest(DiagnosticTest):
    """Runs the reference model, and returns the digests of its gradients and parameters."""

    name: ClassVar[Diagnostic] = Diagnostic.BITWISE
    does: ClassVar[str] = (
        "one step of a small model of the job's structure, dense or with experts, again and again; its bits are "
        "compared with each other and with those of other machines"
    )
    reasons: ClassVar[tuple[Reason, ...]] = (UNSTEADY, FAILED)
    limits_type: ClassVar[type[DiagnosticLimits]] = ReferenceLimits
    imports: ClassVar[tuple[str, ...]] = ("torch",)

    def run(self) -> DiagnosticResult:
        """Test once."""
        from agent.diagnoser.reference.step import before_cuda

        os.environ.update(WITHIN)
        before_cuda()
        limits = self.limits
        listener, port = listening()
        meeting = Meeting(OWN, port, limits.world_size, listener=listener, timeout_s=limits.answer_s)
        try:
            answers = run_ranks(limits.world_size, meeting, self._rank, within_s=limits.deadline_s * 0.9)
        except RanksFailed as error:
            return self.result(self.finding(FAILED, "", str(error), text=f"{FAILED.means}: {error}"))
        rounds = answers[0]["rounds"]
        if odd := {rank: answer["odd"] for rank, answer in enumerate(answers) if answer["odd"]}:
            lines = [
                f"rank {rank}: {len(steps)} of {rounds} steps, e.g. {steps[:ROUNDS_NAMED]}"
                for rank, steps in odd.items()
            ]
            return self.result(self.finding(UNSTEADY, "", *lines), measures={"steps": float(rounds)})
        digests = {
            f"rank {rank} {name}": answer[name]
            for rank, answer in enumerate(answers)
            for name in ("gradients", "parameters")
        }
        return self.result(kind=self._kind(), digests=digests, measures={"steps": float(rounds)})

    def _rank(self, rank: int) -> dict[str, Any]:
        from agent.diagnoser.reference.step import ReferenceRank

        return ReferenceRank(rank, self.limits, self.bench.machine).repeat()

    def _kind(self) -> str:
        sizes = self.limits.model_dump_json(exclude={"seconds", "deadline_s", "answer_s"})
        return f"{arithmetic()}, {sizes}"
