"""Versions of a job's code: what ran when, who changed it and why, and what is asked to run next.

They cross Temporal, and lie in histories, in the store of versions and in the ledger: fields are only added, with
defaults.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError, field_validator

from everstep.base.redaction import PATTERNS, redacted
from everstep.model.job import VARIABLE, JobSpec
from everstep.model.message import Model, Words

NAME_CHARACTERS = 12
"""Of a content address, where people read it."""


class Urgency(Words):
    """When an update is applied (ByteRobust, section 6.1)."""

    LAZY = "lazy"
    """With the next recovery, whatever causes it; forced at the end of its window."""
    URGENT = "urgent"
    """Now, at the end of a step."""


class VersionStatus(Words):
    """Where a version of a job stands."""

    CHECKING = "checking"
    """It is shipped to the machines and tried there."""
    REFUSED = "refused"
    """It could not be made, or failed where it was tried; the job never ran it."""
    PENDING = "pending"
    """It waits for the next restart."""
    WITHDRAWN = "withdrawn"
    """Somebody took it back before it was applied."""
    SUPERSEDED = "superseded"
    """A later one was applied in the same restart: it ran no step."""
    RUNNING = "running"
    REPLACED = "replaced"
    """It ran until a later one was applied."""
    SUSPECT = "suspect"
    """It was rolled back, by a rule or by an operator, and is not run again unless somebody asks for it."""


class Origin(Model):
    """Where the code of a version came from."""

    folder: str = ""
    """Of which a snapshot was taken."""
    commit: str = ""
    """Full id, where the folder is in a git repository."""
    author: str = ""
    """Of the commit, e.g. ``Ada <ada@example.org>``."""
    subject: str = ""
    """First line of the commit's message."""
    dirty: bool = False
    """Files differed from the commit."""


class CodeVersion(Model):
    """What one version runs. ``id`` is made of all that decides what runs, and of nothing else."""

    code: str = ""
    """Digest of the snapshot of its files (``activities/versions``); empty: it runs in place, as its files are."""
    script: str
    """Relative to the snapshot; an absolute path where it runs in place."""
    args: list[str] = Field(default_factory=list)
    cwd: str = ""
    """Working directory on the machines; empty: the folder of the script."""
    cwd_by_default: bool = False
    """Nobody named it: a machine that does not have it takes the script's folder in the snapshot."""
    python: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    packages: dict[str, str] = Field(default_factory=dict)
    """Distribution → version of the interpreter that made it. They are noted, and do not decide what runs."""
    origin: Origin = Field(default_factory=Origin)
    files: int = 0
    bytes: int = 0

    @property
    def id(self) -> str:
        """Its content address, 64 hexadecimal digits."""
        decides = [self.code, self.script, self.args, self.cwd, self.python, sorted(self.env.items())]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def without_secrets(self, patterns: Sequence[str] = PATTERNS) -> CodeVersion:
        """As it may be shown: without the values of variables that look like secrets."""
        return self.model_copy(update={"env": redacted(self.env, patterns)})

    def applied(self, spec: JobSpec, number: int) -> JobSpec:
        """The job as this version runs it; ``number`` is the version's."""
        return spec.model_copy(
            update={
                "code": self.code,
                "script": self.script,
                "args": self.args,
                "cwd": self.cwd,
                "cwd_by_default": self.cwd_by_default,
                "python": self.python,
                "env": self.env,
                "version": number,
            }
        )

    @classmethod
    def of(cls, spec: JobSpec) -> CodeVersion:
        """What a job runs, as far as its spec says."""
        return cls(
            code=spec.code,
            script=spec.script,
            args=spec.args,
            cwd=spec.cwd,
            cwd_by_default=spec.cwd_by_default,
            python=spec.python,
            env=spec.env,
        )


class UpdateRequest(Model):
    """What somebody asks for, by the command or by a signal that is typed by hand.

    One of ``code``, ``git`` and ``version`` says which code; none of them: the code that runs, e.g. with other
    arguments. A relative path is not taken: nobody knows to what it would be relative.
    """

    operator: str = "unknown"
    reason: str = ""
    code: str = ""
    """Absolute path of a folder on the workers' machines."""
    git: str = ""
    """Revision in the git repository of ``code``, or else of the folder from which the running version came."""
    version: int = 0
    """Number of a version that the job has, 0: none."""
    script: str = ""
    """Relative to the folder; empty: as it is."""
    args: list[str] | None = None
    """All arguments of the script; None: as they are."""
    env: dict[str, str] | None = None
    """Variables that are set beside those that there are, or instead of them; None: none."""
    urgency: Urgency = Urgency.LAZY
    window_h: float = Field(24.0, gt=0, le=24 * 365)
    """A lazy one is forced after so long, hours (ByteRobust, section 6.1)."""
    cancel: int = 0
    """Number of a version that is withdrawn instead; 0: none."""
    rollback: bool = False
    """The version that runs is suspect: go back to ``version``, or else to the last steady one."""
    made: CodeVersion | None = None
    """What the command made already and put into the store; None: a worker makes it."""

    @property
    def problem(self) -> str:
        """What makes no sense in it; empty: nothing."""
        if sum(map(bool, (self.code and not self.git, self.git, self.version, self.cancel))) > 1:
            return "code, git, version and cancel exclude each other (code beside git is where its repository is)"
        if self.code and not self.code.startswith("/"):
            return f"code is {self.code!r}: give the absolute path of a folder"
        if self.rollback and (self.code or self.git or self.cancel):
            return "rollback goes to a version that the job has: give its number as version, or none"
        if not self.urgency.known:
            return f"urgency is {str(self.urgency)!r}: it is {' or '.join(Urgency)}"
        if self.version < 0 or self.cancel < 0:
            return "versions are numbered from 1 on"
        return ""

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name in value or {}:
            if not VARIABLE.fullmatch(name) or name.startswith("EVERSTEP_"):
                raise ValueError(f"{name!r} is not a variable that a job can have: name it as in LEARNING_RATE")
        return value


class JobVersion(Model):
    """A version of one job: its number, how it came, and what became of it."""

    number: int
    """From 1 on, in the order in which they were asked for; 1 is what the job was started with."""
    runs: CodeVersion | None = None
    """None: it is not made yet, or could not be made."""
    request: UpdateRequest = Field(default_factory=UpdateRequest)
    status: VersionStatus = VersionStatus.PENDING
    why: str = ""
    """Why it was refused, withdrawn, or is suspect; of what is checked: how far it is."""
    changed: str = ""
    """What changed against the version before it, for people: files, arguments, variables."""
    asked_ns: int = 0
    due_ns: int = 0
    """When it is forced; 0: it is not pending."""
    again: UpdateRequest | None = None
    """What asks for it now, where it ran before: an update that names it, or a rollback; None: nothing does."""
    began_ns: int = 0
    """When it was launched first since it came into the job last; 0: it never was."""
    ranges: list[tuple[int, int, int]] = Field(default_factory=list)
    """Which steps ran under it: the generation that it came with, the completed steps at which that began and at which
    it ended (-1: it runs); the last ones. A script that does not number its steps has -1."""
    steady: bool = False
    """It made steady progress: a rollback goes to it."""
    proven: bool = False
    """It came through its first steps: what fails later is not held against it at once. So is what was steady."""
    failed: int = 0
    """Failures in its first steps."""
    ended: str = ""
    """How it ended, for people; empty: it runs, or never ran."""

    @property
    def wanted(self) -> UpdateRequest:
        """What asks for it, the last time."""
        return self.again or self.request

    @property
    def name(self) -> str:
        """For people: ``v3 (1f3870be274f)``."""
        return f"v{self.number}" + (f" ({self.runs.id[:NAME_CHARACTERS]})" if self.runs else "")

    def without_secrets(self, patterns: Sequence[str] = PATTERNS) -> JobVersion:
        """As it may be shown and kept: without the values of variables that look like secrets.

        Args:
            patterns: Names of such variables; a job has its own (``JobSpec.redact``).
        """

        def asked(request: UpdateRequest | None) -> UpdateRequest | None:
            if request is None:
                return None
            made = request.made and request.made.without_secrets(patterns)
            env = request.env and redacted(request.env, patterns)
            return request.model_copy(update={"env": env, "made": made})

        runs = self.runs and self.runs.without_secrets(patterns)
        return self.model_copy(update={"runs": runs, "request": asked(self.request), "again": asked(self.again)})

    @property
    def is_known(self) -> bool:
        """Whether it can be run: it was made, and not refused."""
        return self.runs is not None and self.status not in {VersionStatus.CHECKING, VersionStatus.REFUSED}


def read_update(raw: Any = None, *more: Any) -> UpdateRequest:
    """A request as a person typed it.

    Raises:
        ValueError: says what is wrong with it, in one line.
    """
    if more or not isinstance(raw, dict):
        example = '{"code": "/home/ada/gpt", "urgency": "lazy", "operator": "ada"}'
        raise ValueError(f"{str(raw)[:80]!r}: send one object, e.g. {example}")
    if unknown := sorted(set(raw) - set(UpdateRequest.model_fields)):
        names = ", ".join(map(repr, unknown[:4]))
        known = ", ".join(name for name in UpdateRequest.model_fields if name != "made")  # which nobody types
        raise ValueError(f"{names}: there is no such field; there are {known}")
    try:
        request = UpdateRequest.model_validate(raw)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(problems[:3])) from error
    if request.problem:
        raise ValueError(request.problem)
    return request
