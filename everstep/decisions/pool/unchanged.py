"""Leaves out of a poll's answers what is the same as in the previous poll, and puts it back.

The machines of a cluster rarely change, and each answer is stored in the history of the pool's workflow.
"""

from __future__ import annotations

import hashlib

from everstep.model.machine import Machine
from everstep.model.message import Model
from everstep.model.pool import PollAnswers, PollDigests

DIGEST_CHARACTERS = 16
"""The length of a digest."""


def digests(answers: PollAnswers) -> PollDigests:
    """Return the digests of complete answers."""
    return PollDigests(
        machines="" if answers.machines is None else _of_list(answers.machines),
        jobs={job.job: _of(job) for job in answers.jobs},
    )


def without_unchanged(answers: PollAnswers, before: PollDigests) -> PollAnswers:
    """Return the answers without the parts whose digests are in ``before``."""
    same = answers.machines is not None and _of_list(answers.machines) == before.machines
    unchanged = [job.job for job in answers.jobs if before.jobs.get(job.job) == _of(job)]
    return answers.model_copy(
        update={
            "machines": None if same else answers.machines,
            "same_machines": same,
            "jobs": [job for job in answers.jobs if job.job not in unchanged],
            "same_jobs": unchanged,
        }
    )


def with_unchanged(answers: PollAnswers, before: PollAnswers) -> PollAnswers:
    """Return complete answers: the parts that were left out come from the complete answers to the previous poll."""
    known = {job.job: job for job in before.jobs}
    return answers.model_copy(
        update={
            "machines": before.machines if answers.same_machines else answers.machines,
            "same_machines": False,
            "jobs": [*answers.jobs, *(known[job] for job in answers.same_jobs)],
            "same_jobs": [],
        }
    )


def _of_list(machines: list[Machine]) -> str:
    return _digest("\n".join(machine.model_dump_json() for machine in machines))


def _of(part: Model) -> str:
    return _digest(part.model_dump_json())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
