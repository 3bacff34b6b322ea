"""This module protects the calls of agents with TLS and a bearer token.

The control plane and other agents call an agent, and a caller can run programs as the agent's user. So every call needs
the token, also on loopback addresses, which all users of a machine can reach. On other addresses TLS is required too.
Options and variables name the files of tokens and keys, and never contain the tokens and keys themselves.
"""

from __future__ import annotations

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
from everstep.errors import ConfigError
from everstep.rank import environment

TOKEN_FILE = environment.AGENT_TOKEN_FILE
CA_FILE = environment.AGENT_CA_FILE
CERT_FILE = environment.AGENT_CERT_FILE
KEY_FILE = environment.AGENT_KEY_FILE

SOON_DAYS = 14.0
"""The agent logs a warning if its certificate expires within this number of days."""
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

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials of the gRPC server; None: it does not use TLS.

        Raises:
            ConfigError: a file cannot be read, or the certificate and the key cannot be used.
        """
        if not (self.tls_cert and self.tls_key):
            return None
        pair = (read_secret(self.tls_key, "TLS key"), read_secret(self.tls_cert, "TLS certificate"))
        if (days := check_pair(self.tls_cert, self.tls_key)) < SOON_DAYS:
            logger.warning("the certificate expires soon", certificate=str(self.tls_cert), days=round(days, 1))
        authority = read_secret(self.tls_client_ca, "client CA") if self.tls_client_ca else None
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)

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

    def interceptors(self) -> list[Interceptor]:
        """Return the interceptors of the gRPC server: the check of the token, if there is one."""
        return [TokenCheck(read_secret(self.token_file, "token file").strip())] if self.token_file else []


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.geteuid()}"


class TokenCheck(Interceptor):
    """Refuses every call without the header ``authorization: Bearer <token>``, including health checks."""

    def __init__(self, token: bytes) -> None:
        self._expected = b"Bearer " + token

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
        if hmac.compare_digest(sent_bytes, self._expected):
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

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a gRPC channel; None: it does not use TLS."""
        if self.ca_file is None:
            return None
        key = read_secret(self.key_file, "client key") if self.key_file else None
        cert = read_secret(self.cert_file, "client certificate") if self.cert_file else None
        return grpc.ssl_channel_credentials(read_secret(self.ca_file, "CA file"), key, cert)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call: the token, if there is one."""
        if self.token_file is None:
            return ()
        return (("authorization", "Bearer " + read_secret(self.token_file, "token file").decode().strip()),)


DAY_S = 86_400.0


def check_pair(cert: Path, key: Path) -> float:
    """Check that a certificate and its key can be used today.

    Returns:
        Days until the certificate ends.

    Raises:
        ConfigError: a file is not in PEM format, the files do not belong together, or the certificate is not valid now.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # without this, it may ask for a password on the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {cert}: give the pair") from error
        raise ConfigError(f"{cert} and {key} are no certificate and unencrypted key in PEM: {error}") from error
    begins, ends = _validity(cert)
    now = time.time()
    if now > ends:
        raise ConfigError(f"the certificate {cert} expired {(now - ends) / DAY_S:.0f} days ago: issue another one")
    if now < begins:
        raise ConfigError(
            f"the certificate {cert} is valid in {(begins - now) / DAY_S:.1f} days only: correct it, or this clock"
        )
    return (ends - now) / DAY_S


def _validity(cert: Path) -> tuple[float, float]:
    """Return the beginning and the end of a certificate's validity, seconds since 1970."""
    # Python can read any certificate, but its public functions read only certificates of authorities.
    decoded = ssl._ssl._test_decode_cert(str(cert))  # type: ignore[attr-defined]
    return ssl.cert_time_to_seconds(decoded["notBefore"]), ssl.cert_time_to_seconds(decoded["notAfter"])
