"""An HTTP POST with verified TLS and limits of time and size, only to the named host."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import everstep
from activities.notices.settings import target
from everstep.errors import NoticeError

ANSWER_BYTES = 2048
"""The largest number of bytes that are read of an answer."""


async def post(
    url: str, body: bytes, *, id: str, headers: Mapping[str, str], ca_file: Path | None, deadline_s: float
) -> str:
    """Send JSON; returns the answer's status, e.g. ``HTTP 202 Accepted``.

    No proxy is used and no redirect is followed.

    Args:
        url: An ``https://`` address, or ``http://`` on this machine.
        body: The JSON.
        id: The event's id, for the header ``Idempotency-Key``: a receiver can recognize a repeated notice by it.
        headers: Additional headers.
        ca_file: Additional certificates of authorities.
        deadline_s: The time limit of the whole exchange, seconds.

    Raises:
        NoticeError: the notice was not accepted; the message contains neither the URL's path nor the headers.
    """
    parts = urlsplit(url)
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    sent = {
        **headers,
        "Content-Type": "application/json; charset=utf-8",
        "Idempotency-Key": id,
        "User-Agent": f"everstep/{everstep.__version__}",
        "Connection": "close",
    }
    opened: list[socket.socket] = []
    try:
        connection = _connection(url, ca_file, deadline_s)
        async with asyncio.timeout(deadline_s):
            return await asyncio.to_thread(_exchange, connection, opened, path, body, sent)
    except TimeoutError:
        raise NoticeError(f"{target(parts)} did not answer within {deadline_s:g} s") from None
    except ssl.SSLCertVerificationError as error:
        hint = "if the system does not know its authority, set ca_file"
        raise NoticeError(f"the certificate of {target(parts)} is not valid: {error.verify_message}; {hint}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise NoticeError(f"{target(parts)} cannot be reached: {reason}") from None
    finally:
        for one in opened:
            with contextlib.suppress(OSError):  # this ends a thread that still waits for the socket
                one.shutdown(socket.SHUT_RDWR)


def _connection(url: str, ca_file: Path | None, deadline_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=deadline_s)
    trust = ssl.create_default_context()
    if ca_file is not None:
        trust.load_verify_locations(ca_file)
    return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=deadline_s, context=trust)


def _exchange(
    connection: http.client.HTTPConnection,
    opened: list[socket.socket],
    path: str,
    body: bytes,
    headers: Mapping[str, str],
) -> str:
    """Send the request and return the answer's status. This runs in a thread, and ends early if the socket in
    ``opened`` is shut down."""
    with contextlib.closing(connection):
        connection.connect()
        opened.append(connection.sock)
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        with response:
            return _judged(response)


def _judged(response: http.client.HTTPResponse) -> str:
    status = f"HTTP {response.status} {response.reason}".strip()
    if 200 <= response.status < 300:
        return status
    if 300 <= response.status < 400:
        elsewhere = ""
        with contextlib.suppress(ValueError):  # an address that cannot be read is not shown
            elsewhere = target(urlsplit(response.headers.get("Location", "")))
        raise NoticeError(f"{status}: it redirects{f' to {elsewhere}' if elsewhere else ''}: use the final URL")
    text = " ".join(response.read(ANSWER_BYTES).decode(errors="replace").split())
    raise NoticeError(f"{status}: {text[:200]}" if text else status)
