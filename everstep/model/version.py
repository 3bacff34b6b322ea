"""Defines versions of a job's code: which ran when, who changed the code and why, and which has to run next.

These models are sent through Temporal, and are stored in histories, in the store of versions and in the ledger. So
fields are only added, with defaults.
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
"""Number of characters of a content address that people see."""


class Urgency(Words):
    """When an update is applied (ByteRobust, section 6.1)."""

    LAZY = "lazy"
    """The version is applied with the next recovery, or at the latest at the end of its window."""
    URGENT = "urgent"
    """The version is applied now, at the end of a step."""


class VersionStatus(Words):
    """The status of a version of a job."""

    CHECKING = "checking"
    """The version is shipped to the machines and tried there."""
    REFUSED = "refused"
    """The version could not be made, or failed where it was tried; the job never ran it."""
    PENDING = "pending"
    """The version waits for the next restart."""
    WITHDRAWN = "withdrawn"
    """The version was withdrawn before it was applied."""
    SUPERSEDED = "superseded"
    """A later version was applied in the same restart, so this version ran no step."""
    RUNNING = "running"
    REPLACED = "replaced"
    """The version ran until a later version was applied."""
    SUSPECT = "suspect"
    """The version was rolled back, by a rule or an operator, and runs again only on request."""


class Origin(Model):
    """Where the code of a version came from."""

    folder: str = ""
    """The folder of the snapshot."""
    commit: str = ""
    """Full id of the commit, if the folder is in a git repository."""
    author: str = ""
    """Author of the commit, e.g. ``Ada <ada@example.org>``."""
    subject: str = ""
    """First line of the commit's message."""
    dirty: bool = False
    """Files differed from the commit."""


class CodeVersion(Model):
    """The code and settings of one version. Its ``id`` is a digest of all fields that decide what runs."""

    code: str = ""
    """Digest of the snapshot of its files (``activities/versions``); empty: it runs in place, without a snapshot."""
    script: str
    """Path relative to the snapshot; an absolute path if it runs in place."""
    args: list[str] = Field(default_factory=list)
    cwd: str = ""
    """Working directory on the machines; empty: the folder of the script."""
    cwd_by_default: bool = False
    """``cwd`` is a default: a machine without it uses the script's folder in the snapshot."""
    python: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    packages: dict[str, str] = Field(default_factory=dict)
    """Distribution → its version, in the interpreter that took the snapshot. This is only a record: it does not decide
    what runs."""
    origin: Origin = Field(default_factory=Origin)
    files: int = 0
    bytes: int = 0

    @property
    def id(self) -> str:
        """The content address, 64 hexadecimal digits."""
        decides = [self.code, self.script, self.args, self.cwd, self.python, sorted(self.env.items())]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def without_secrets(self, patterns: Sequence[str] = PATTERNS) -> CodeVersion:
        """A copy that may be shown: without the values of variables that look like secrets."""
        return self.model_copy(update={"env": redacted(self.env, patterns)})

    def applied(self, spec: JobSpec, number: int) -> JobSpec:
        """The job's specification with this version's code and settings.

        Args:
            spec: The specification that is changed.
            number: The number of this version.
        """
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
        """The version that a job's spec describes."""
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
    """A request for an update, by the command or by a signal that is typed by hand.

    ``code``, ``git`` or ``version`` names the code; without them the running code stays, e.g. with other arguments.
    Relative paths are refused, since workers do not know the folder to which they are relative.
    """

    operator: str = "unknown"
    reason: str = ""
    code: str = ""
    """Absolute path of a folder on the workers' machines."""
    git: str = ""
    """Revision in the git repository of ``code``, or else of the folder from which the running version came."""
    version: int = 0
    """Number of a version that the job has; 0: none is named."""
    script: str = ""
    """Path relative to the folder; empty: unchanged."""
    args: list[str] | None = None
    """All arguments of the script; None: unchanged."""
    env: dict[str, str] | None = None
    """Variables to add or to replace; None: no variables."""
    urgency: Urgency = Urgency.LAZY
    window_h: float = Field(24.0, gt=0, le=24 * 365)
    """Time after which a lazy update is forced, hours (ByteRobust, section 6.1)."""
    cancel: int = 0
    """Number of a version to withdraw; 0: none."""
    rollback: bool = False
    """The running version is suspect: roll back to ``version``, or to the last steady one if ``version`` is 0."""
    made: CodeVersion | None = None
    """The version that the command has already put into the store; None: a worker makes it."""

    @property
    def problem(self) -> str:
        """Why the request makes no sense; empty: it makes sense."""
        if sum(map(bool, (self.code and not self.git, self.git, self.version, self.cancel))) > 1:
            return "code, git, version and cancel exclude each other (except code with git: it names the repository)"
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
    """A version of one job: its number, its request, and its history."""

    number: int
    """Number in the order of requests; 1 is the version with which the job started."""
    runs: CodeVersion | None = None
    """Code and settings of the version; None: it is not made yet, or could not be made."""
    request: UpdateRequest = Field(default_factory=UpdateRequest)
    status: VersionStatus = VersionStatus.PENDING
    why: str = ""
    """Why the version was refused, withdrawn or rolled back; while it is checked: the progress."""
    changed: str = ""
    """Changes against the version before it, for people: files, arguments, variables."""
    asked_ns: int = 0
    due_ns: int = 0
    """When the version is forced, nanoseconds of the wall clock; 0: it is not pending."""
    again: UpdateRequest | None = None
    """The request to run the version again, by an update or a rollback; None: there is none."""
    began_ns: int = 0
    """When the version was first launched after its newest request, nanoseconds of the wall clock; 0: never."""
    ranges: list[tuple[int, int, int]] = Field(default_factory=list)
    """The last launches of the version: generation, completed steps at the beginning, and completed steps at the end
    (-1: it still runs). If a script does not number its steps, the completed steps are -1."""
    steady: bool = False
    """The version made steady progress, so a rollback may go to it."""
    proven: bool = False
    """The version survived its first steps, so a later failure does not blame it at once. A steady version is proven
    too."""
    failed: int = 0
    """Failures in its first steps."""
    ended: str = ""
    """How the version ended, for people; empty: it runs, or never ran."""

    @property
    def wanted(self) -> UpdateRequest:
        """The newest request for it."""
        return self.again or self.request

    @property
    def name(self) -> str:
        """The version for people, e.g. ``v3 (1f3870be274f)``."""
        return f"v{self.number}" + (f" ({self.runs.id[:NAME_CHARACTERS]})" if self.runs else "")

    def without_secrets(self, patterns: Sequence[str] = PATTERNS) -> JobVersion:
        """A copy that may be shown and kept: without the values of variables that look like secrets.

        Args:
            patterns: Patterns of the names of such variables, e.g. ``JobSpec.redact``.
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
        """Whether the version can be run: it was made, and not refused."""
        return self.runs is not None and self.status not in {VersionStatus.CHECKING, VersionStatus.REFUSED}


def read_update(raw: Any = None, *more: Any) -> UpdateRequest:
    """Read a request that a person typed.

    Raises:
        ValueError: the request is wrong; the message says how, in one line.
    """
    if more or not isinstance(raw, dict):
        example = '{"code": "/home/ada/gpt", "urgency": "lazy", "operator": "ada"}'
        raise ValueError(f"{str(raw)[:80]!r}: send one object, e.g. {example}")
    if unknown := sorted(set(raw) - set(UpdateRequest.model_fields)):
        names = ", ".join(map(repr, unknown[:4]))
        fields = ", ".join(name for name in UpdateRequest.model_fields if name != "made")  # only commands set it
        raise ValueError(f"{names}: there is no such field; there are {fields}")
    try:
        request = UpdateRequest.model_validate(raw)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise ValueError("; ".join(problems[:3])) from error
    if request.problem:
        raise ValueError(request.problem)
    return request
