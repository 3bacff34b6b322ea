"""The receivers of notices, from a file.

The file is TOML, one table for each receiver::

    [[receiver]]
    name = "pager"                                  # the name in logs and in the Web UI
    kinds = ["parked", "job-failed"]                # the default is all kinds
    url = "https://events.example/v2/notices"       # gets each notice as a POST of JSON
    headers_from = {Authorization = "PAGER_AUTHORIZATION"}   # header = name of the worker's variable
    ca_file = "/etc/everstep/events-ca.crt"         # in addition to the system's authorities
    deadline_s = 10

    [[receiver]]
    name = "mail"
    command = ["/opt/site/mail-on-call", "--short"]  # gets the JSON on its standard input; there is no shell

``url_from = "VARIABLE"`` replaces ``url`` if the address itself is a secret.
"""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everstep.base.addresses import is_loopback
from everstep.base.redaction import masked
from everstep.errors import ConfigError
from everstep.model.notice import NoticeKind

LONGEST_S = 300.0
"""The longest time limit of a delivery, seconds."""
OURS = {"connection", "content-length", "content-type", "host", "idempotency-key", "transfer-encoding", "user-agent"}
"""Headers that the settings of a receiver may not contain."""
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class Receiver(BaseModel):
    """A program or an address that receives notices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    """The receiver's name in logs and in the history of each notice; small letters, digits and dashes."""
    kinds: list[str] = Field(default_factory=list)
    """The kinds of notices that it receives; empty: all kinds."""
    command: list[str] = Field(default_factory=list)
    """The program with its arguments; exit code 0 means that it accepted the notice."""
    url: str = ""
    """The URL of the POST; an answer of 200 to 299 means that the notice was accepted."""
    url_from: str = ""
    """The name of the variable that has the URL; it replaces ``url``."""
    headers_from: dict[str, str] = Field(default_factory=dict)
    """Header → name of the variable that has its value."""
    ca_file: Path | None = None
    """Certificates of authorities that are trusted in addition to the system's."""
    deadline_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """The time limit of each attempt, seconds."""

    def wants(self, kind: str) -> bool:
        """Return whether the receiver gets notices of a kind."""
        return not self.kinds or kind in self.kinds or kind == NoticeKind.TEST


class NoticeSettings(BaseModel):
    """The settings of all receivers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    receiver: list[Receiver] = Field(default_factory=list)

    def named(self, name: str) -> Receiver | None:
        """Return the receiver with a name; None: there is none."""
        return next((one for one in self.receiver if one.name == name), None)

    def for_kind(self, kind: str) -> list[str]:
        """Return the names of the receivers of a kind of notices."""
        return [one.name for one in self.receiver if one.wants(kind)]

    @classmethod
    def parse(cls, table: Mapping[str, Any], env: Mapping[str, str], origin: str) -> NoticeSettings:
        """Return the receivers in a file.

        Args:
            table: The contents of the file.
            env: The environment variables of this process.
            origin: The source of the table for messages, e.g. the path of the file.

        Raises:
            ConfigError: the file has errors; the message lists all errors, each with its place and remedy. Values of
                variables are not shown.
        """
        try:
            settings = cls.model_validate(table)
        except ValidationError as error:
            raise ConfigError(_text(origin, [_problem_of(part) for part in error.errors()])) from None
        problems = [] if settings.receiver else ["it has no receiver: add a table [[receiver]]"]
        names = [one.name for one in settings.receiver]
        problems += [
            f"two receivers are named {name!r}: give each its own name"
            for name in sorted({one for one in names if names.count(one) > 1})
        ]
        problems += [f"receiver {one.name}: {what}" for one in settings.receiver for what in _problems(one, env)]
        if problems:
            raise ConfigError(_text(origin, problems))
        return settings


def url_of(receiver: Receiver, env: Mapping[str, str]) -> str:
    """Return the URL to which notices are sent; empty: its variable is missing."""
    return receiver.url or env.get(receiver.url_from, "").strip()


def secrets_of(receiver: Receiver, env: Mapping[str, str]) -> list[str]:
    """Return the receiver's secret values, the longest first."""
    names = [*receiver.headers_from.values(), *([receiver.url_from] if receiver.url_from else [])]
    return sorted({env[name].strip() for name in names if env.get(name, "").strip()}, key=len, reverse=True)


def _problems(receiver: Receiver, env: Mapping[str, str]) -> Iterator[str]:
    ways = [name for name in ("command", "url", "url_from") if getattr(receiver, name)]
    if len(ways) != 1:
        has = f"it has {' and '.join(ways)}" if ways else "it has none"
        yield f"give it one of command, url and url_from; {has}"
    known = [str(kind) for kind in NoticeKind if kind is not NoticeKind.TEST]
    for kind in receiver.kinds:
        if kind not in known:
            near = difflib.get_close_matches(kind, known, n=1)
            yield f"there is no kind {kind!r}; " + (f"did you mean {near[0]!r}?" if near else _there_are(known))
    if receiver.command and shutil.which(receiver.command[0]) is None:
        yield f"the program {receiver.command[0]!r} does not exist, or is not executable"
    if receiver.url:
        yield from (f"url {masked(receiver.url)!r}: {what}" for what in _of_url(receiver.url))
    if receiver.url_from:
        missing = _value(receiver.url_from, env)
        found = [missing] if missing else _of_url(url_of(receiver, env))
        yield from (f"url_from {receiver.url_from}: {what}" for what in found)
    if receiver.command and (receiver.headers_from or receiver.ca_file):
        yield "headers_from and ca_file are for a URL; a program has the variables of the worker"
    for header, name in receiver.headers_from.items():
        if not _HEADER.fullmatch(header) or header.lower() in OURS:
            yield f"headers_from: {header!r} cannot be set: name a header such as Authorization"
        elif problem := _value(name, env):
            yield f"headers_from: {problem}"
    if receiver.ca_file and not receiver.ca_file.is_file():
        yield f"ca_file: there is no file {receiver.ca_file}"


def _value(name: str, env: Mapping[str, str]) -> str:
    """Return what is wrong with the value of a variable, without showing the value; empty: nothing is wrong."""
    value = env.get(name, "").strip()
    if not value:
        return f"the variable {name} is not set: set it where the workers, or 'everstep up', are started"
    return "" if value.isascii() and value.isprintable() else f"the variable {name} has characters that are not ASCII"


def _of_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        yield f"it is not a URL ({error})"
        return
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        yield "it is not a URL: write https://host/path, with special characters as %xx"
    elif parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        yield "write https://; http:// is for addresses of this machine only"
    elif parts.username is not None or parts.password is not None:
        yield "it contains a user or a password: use headers_from or url_from with a variable"


def target(parts: SplitResult) -> str:
    """Return a URL's host, the only part that logs may show: path and query may be secret."""
    return parts.netloc.rpartition("@")[2]


def _there_are(names: list[str]) -> str:
    return f"there are {', '.join(names)}"


def _problem_of(error: Any) -> str:
    """Return an error of the model as text."""
    place, kind = [str(part) for part in error["loc"]], error["type"]
    where = f"receiver number {int(place[1]) + 1}: " if len(place) > 1 and place[1].isdecimal() else ""
    name = ".".join(place[2:] if where else place)
    if kind == "extra_forbidden":
        return (
            f"{where}there is no setting {name!r}; {_there_are(list(Receiver.model_fields) if where else ['receiver'])}"
        )
    if kind == "missing":
        return f"{where}{name} is missing"
    if kind == "string_pattern_mismatch":
        return f"{where}{name} is {error.get('input')!r}: use small letters, digits and dashes, 41 at most"
    return f"{where}{name}: {error['msg']}"


def _text(origin: str, problems: list[str]) -> str:
    return f"{origin}: {problems[0]}" if len(problems) == 1 else "\n  ".join([f"{origin}:", *problems])
