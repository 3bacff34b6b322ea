"""Answers of a rank's server: a record, no record, or something that torch does not send."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.tracer.control_plane import HANDLERS, flight_record
from everstep.errors import CannotInspect

LIMIT_S = 5.0
RECORD = {"version": "2.5", "entries": [{"record_id": 1, "collective_seq_id": 3, "state": "scheduled", "extra": 1}]}


Answers = Callable[[dict[str, bytes]], Path]


@pytest.fixture
def server() -> Iterator[Answers]:
    """Yields a function that starts a server with these answers. It answers all other questions with 404."""
    listening = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory(prefix="everstep-test-") as folder, listening:
        path = Path(folder) / "control"

        def serve(answers: dict[str, bytes]) -> None:
            for _ in HANDLERS:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    asked = connection.recv(1 << 12).split()[1].decode().removeprefix("/handler/")
                    status = b"200 OK" if asked in answers else b"404 Not Found"
                    connection.sendall(b"HTTP/1.0 " + status + b"\r\n\r\n" + answers.get(asked, b""))

        def started(answers: dict[str, bytes]) -> Path:
            listening.bind(str(path))
            listening.listen()
            threads.append(threading.Thread(target=serve, args=(answers,)))
            threads[0].start()
            return path

        threads: list[threading.Thread] = []
        yield started
        listening.shutdown(socket.SHUT_RDWR)  # this ends an accept() that is not needed any more
        for thread in threads:
            thread.join()


def test_a_record_is_cut_to_what_an_analysis_needs(server: Answers) -> None:
    found = json.loads(flight_record(server({HANDLERS[0]: json.dumps(RECORD).encode()}), LIMIT_S))
    assert found == {
        "version": "2.5",
        "entries": [{"record_id": 1, "collective_seq_id": 3, "state": "scheduled"}],
    }


@pytest.mark.parametrize(
    "odd",
    [
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b"{",
        b"",
        b'{"entries": 3}',
        b'{"entries": [1]}',
        b'{"entries": []}',
        b"[" * 9999,
    ],
    ids=["list", "null", "number", "text", "cut", "empty", "no-list", "no-entries", "none", "deep"],
)
def test_what_is_no_record_is_passed_over(server: Answers, odd: bytes) -> None:
    """Another handler may have a record."""
    answers = {HANDLERS[0]: odd, HANDLERS[2]: json.dumps(RECORD).encode()}
    assert json.loads(flight_record(server(answers), LIMIT_S))["version"] == "2.5"


def test_without_any_record_that_is_told(server: Answers) -> None:
    with pytest.raises(CannotInspect, match="no record of collectives"):
        flight_record(server({HANDLERS[0]: b"[]"}), LIMIT_S)
