"""This module protects the calls of agents with TLS and a bearer token.

The control plane and other agents call an agent, and a caller can run programs as the agent's user. So every call needs
the token, also on loopback addresses, which all users of a machine can reach. On other addresses TLS is required too.
Options and variables name the files of tokens and keys, and never contain the tokens and keys themselves.

All files may be replaced while their process runs. An agent reads its files again and again, and a caller reads its
files again once an agent refuses them. A file of tokens may have several lines: an agent accepts the token of each
line, and a caller presents the token of the first line. So one token can replace another one without a failed call.
"""

from __future__ import annotations

import asyncio
import getpass
import hmac
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog

from everstep.base.addresses import is_loopback
from everstep.base.log_once import LoggedErrors
from everstep.errors import ConfigError
from everstep.rank import environment

TOKEN_FILE = environment.AGENT_TOKEN_FILE
CA_FILE = environment.AGENT_CA_FILE
CERT_FILE = environment.AGENT_CERT_FILE
KEY_FILE = environment.AGENT_KEY_FILE

RELOAD_S = 1.0
"""The time between two reads of an agent's files, and the shortest time between two reads of a caller's files,
seconds."""
MAKE_TOKEN = "make one with '(umask 077; openssl rand -hex 32 > FILE)'"

logger = structlog.get_logger()

if TYPE_CHECKING:  # gRPC's classes accept type arguments in its type stubs, but not at run time
    Handler = grpc.RpcMethodHandler[Any, Any]
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Handler, Interceptor = grpc.RpcMethodHandler, grpc.aio.ServerInterceptor


def read_secret(path: Path, what: str) -> bytes:
    """Return the contents of a file, which must not be empty; ``what`` describes the file in messages.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error.strerror}") from error
    if not contents.strip():
        raise ConfigError(f"the {what} {path} is empty")
    return contents


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """Return the tokens of a file, one on each line; empty lines do not count.

    Raises:
        ConfigError: the file cannot be read, has no token, or a token is not printable ASCII.
    """
    tokens = tuple(filter(None, (line.strip() for line in read_secret(path, "token file").splitlines())))
    if any(not token.isascii() or not token.decode().isprintable() for token in tokens):
        raise ConfigError(f"the token file {path} has other characters than printable ASCII: {MAKE_TOKEN}")
    return tokens


@dataclass(frozen=True)
class ServerSecurity:
    """The files with an agent's certificate, key and token. They determine what the agent requires of its callers."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    tls_client_ca: Path | None = None
    """If it is set, callers must present a certificate that this authority signed."""
    insecure: bool = False
    """Serve all users of this machine without a token; only allowed on loopback addresses."""

    def check(self, host: str) -> None:
        """Refuse options with which programs or users without permission could call the agent.

        Raises:
            ConfigError: only one file of a pair is set; the address is not a loopback address, and TLS or the token is
                missing; or the agent would require neither a token nor a client certificate, and ``insecure`` is false.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
        if not is_loopback(host) and not (self.tls_cert and self.token_file):
            raise ConfigError(
                f"refusing to listen on {host}: anyone who reaches an agent can run programs on its machine. "
                "Give --tls-cert, --tls-key and --token-file, or listen on a loopback address such as 127.0.0.1"
            )
        if not (self.token_file or self.tls_client_ca or self.insecure):
            raise ConfigError(
                f"refusing to serve without a token: any user of this machine could run programs as {_user()}. "
                f"Give --token-file FILE, here and to workers and commands in {TOKEN_FILE}; {MAKE_TOKEN}. "
                "If no one else uses this machine, --insecure serves without a token"
            )

    def read(self) -> ServerKeys:
        """Return the contents of the files.

        Raises:
            ConfigError: a file cannot be read, or has no token.
        """
        return ServerKeys(
            tokens=read_tokens(self.token_file) if self.token_file else (),
            cert=read_secret(self.tls_cert, "TLS certificate") if self.tls_cert else b"",
            key=read_secret(self.tls_key, "TLS key") if self.tls_key else b"",
            client_ca=read_secret(self.tls_client_ca, "client CA") if self.tls_client_ca else b"",
        )

    def as_client(self, ca_file: Path | None) -> ClientSecurity:
        """Return what this agent presents to other agents, which have the same requirements as this agent."""
        from_environment = ClientSecurity.from_environment()
        own = (self.tls_cert, self.tls_key) if self.tls_client_ca else (None, None)
        return ClientSecurity(
            ca_file=ca_file or from_environment.ca_file,
            token_file=self.token_file or from_environment.token_file,
            cert_file=from_environment.cert_file or own[0],
            key_file=from_environment.key_file or own[1],
        )


@dataclass(frozen=True)
class ServerKeys:
    """The contents of an agent's files; empty: there is no such file."""

    tokens: tuple[bytes, ...] = ()
    cert: bytes = b""
    key: bytes = b""
    client_ca: bytes = b""

    def certificates(self) -> grpc.ServerCertificateConfiguration:
        """Return what gRPC needs for new connections."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca or None)


class Requirements:
    """What an agent requires of its callers now. :meth:`reload` reads the files again.

    Args:
        security: The files.

    Raises:
        ConfigError: a file cannot be read, or the certificate and the key cannot be used.
    """

    def __init__(self, security: ServerSecurity) -> None:
        self._security = security
        self._logged = LoggedErrors()
        self.keys = self._read(None)

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials of the gRPC server; None: it does not use TLS."""
        if not self.keys.cert:
            return None

        def current() -> grpc.ServerCertificateConfiguration:
            return self.keys.certificates()

        return grpc.dynamic_ssl_server_credentials(current(), current, bool(self.keys.client_ca))

    def interceptors(self) -> list[Interceptor]:
        """Return the interceptors of the gRPC server: the check of the token, if there is one."""
        return [TokenCheck(lambda: self.keys.tokens)] if self._security.token_file else []

    def reload(self) -> None:
        """Read the files again; if they cannot be used, the earlier contents stay valid. This waits for a disk."""
        try:
            found = self._read(self.keys)
        except ConfigError as error:
            if self._logged.is_new("files", error):
                logger.error("files cannot be used; the earlier ones stay valid", problem=str(error))
            return
        self._logged.recovered("files")
        if found != self.keys:
            logger.info("new certificates or tokens are used", tokens=len(found.tokens))
            self.keys = found

    def _read(self, known: ServerKeys | None) -> ServerKeys:
        found, files = self._security.read(), self._security
        if files.tls_cert and files.tls_key and (known is None or (found.cert, found.key) != (known.cert, known.key)):
            check_pair(files.tls_cert, files.tls_key)
            if problem := problem_of(files.tls_cert, time.time()):
                logger.error("callers refuse this agent", problem=problem)
        return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.geteuid()}"


class TokenCheck(Interceptor):
    """Refuses every call without the header ``authorization: Bearer <token>``, including health checks.

    Args:
        tokens: Returns the tokens that are accepted now.
    """

    def __init__(self, tokens: Callable[[], tuple[bytes, ...]]) -> None:
        self._tokens = tokens

        async def refuse(_: object, context: grpc.aio.ServicerContext[object, object]) -> object:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"no valid token; name its file in {TOKEN_FILE}")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Check one call."""
        sent = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        sent_bytes = sent.encode() if isinstance(sent, str) else sent
        if any(hmac.compare_digest(sent_bytes, b"Bearer " + token) for token in self._tokens()):
            return await continuation(handler_call_details)
        return self._refusal


@dataclass(frozen=True)
class ClientSecurity:
    """The files with the CA, the token, the certificate and the key that a caller of agents uses."""

    ca_file: Path | None = None
    token_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def from_environment(cls) -> ClientSecurity:
        """Return the files that the variables ``EVERSTEP_AGENT_*_FILE`` name."""
        names = (CA_FILE, TOKEN_FILE, CERT_FILE, KEY_FILE)
        return cls(*(Path(os.environ[name]) if os.environ.get(name) else None for name in names))

    def read(self) -> ClientKeys:
        """Return the contents of the files.

        Raises:
            ConfigError: a file cannot be read, or has no token.
        """
        return ClientKeys(
            token=read_tokens(self.token_file)[0] if self.token_file else b"",
            ca=read_secret(self.ca_file, "CA file") if self.ca_file else b"",
            cert=read_secret(self.cert_file, "client certificate") if self.cert_file else b"",
            key=read_secret(self.key_file, "client key") if self.key_file else b"",
        )


@dataclass(frozen=True)
class ClientKeys:
    """The contents of the files of a caller of agents; empty: there is no such file."""

    token: bytes = b""
    ca: bytes = b""
    cert: bytes = b""
    key: bytes = b""

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a gRPC channel; None: it does not use TLS."""
        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.cert or None) if self.ca else None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call: the token, if there is one."""
        return (("authorization", "Bearer " + self.token.decode()),) if self.token else ()


class Presented:
    """What a process presents to agents. The clients of a process share it.

    Args:
        security: The files.

    Raises:
        ConfigError: a file cannot be read, or has no token.
    """

    def __init__(self, security: ClientSecurity) -> None:
        self._security = security
        self._read_s = -RELOAD_S
        self._logged = LoggedErrors()
        self.keys = security.read()

    async def reload(self) -> None:
        """Read the files again, unless they were just read; if they cannot be used, the earlier contents are used."""
        if time.monotonic() - self._read_s < RELOAD_S:
            return
        self._read_s = time.monotonic()
        try:
            self.keys = await asyncio.to_thread(self._security.read)
        except ConfigError as error:
            if self._logged.is_new("files", error):
                logger.warning("files cannot be used; the earlier contents are presented", problem=str(error))
        else:
            self._logged.recovered("files")


DAY_S = 86_400.0


def check_pair(cert: Path, key: Path) -> None:
    """Check that a certificate and a key can be used together. They may have expired.

    Raises:
        ConfigError: a file is not in PEM format, or the files do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # without this, it may ask for a password on the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {cert}: give the pair") from error
        raise ConfigError(f"{cert} and {key} are no certificate and unencrypted key in PEM: {error}") from error
    except OSError as error:
        raise ConfigError(f"{cert} or {key} cannot be read: {error.strerror}") from error


def problem_of(cert: Path, now: float) -> str:
    """Return why a certificate is not valid at a time, and what to do; empty: it is valid.

    Args:
        cert: A file in PEM format.
        now: The time, seconds since 1970.

    Raises:
        ConfigError: the file cannot be read, or has no certificate.
    """
    begins, ends = validity(cert)
    if now > ends:
        return f"the certificate {cert} expired {(now - ends) / DAY_S:.1f} days ago: issue another one"
    if now < begins:
        return f"the certificate {cert} is valid in {(begins - now) / DAY_S:.1f} days only: correct it, or this clock"
    return ""


def validity(cert: Path) -> tuple[float, float]:
    """Return the beginning and the end of the validity of a file's first certificate, seconds since 1970.

    Raises:
        ConfigError: the file cannot be read, or has no certificate.
    """
    # Python can read any certificate, but its public functions read only certificates of authorities.
    try:
        decoded = ssl._ssl._test_decode_cert(str(cert))  # type: ignore[attr-defined]
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{cert} has no certificate in PEM that can be read: {error}") from error
    return ssl.cert_time_to_seconds(decoded["notBefore"]), ssl.cert_time_to_seconds(decoded["notAfter"])
