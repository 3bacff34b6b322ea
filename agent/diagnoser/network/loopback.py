"""In the loopback test, the machine sends TCP data to itself, through processors, memory and kernel, but no cable."""

from __future__ import annotations

import socket
import threading
from typing import ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import hardware
from agent.diagnoser.network.stream import Received, receive, send
from everstep.errors import CannotInspect
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Reason, Remedy
from everstep.system.listening import listen

DAMAGED = Reason(
    "loopback-damaged", "bytes that the machine sends itself arrive changed", remedy=Remedy.REPLACE, sure=True
)
ANSWER_S = 10.0
"""If a connection makes no progress for this long, it has failed, seconds."""


class LoopbackLimits(DiagnosticLimits):
    """Limits of the loopback test."""

    rounds: int = Field(default=3, ge=1)
    """Number of rounds. The fastest one counts, since other work on the machine can only slow it down."""
    seconds: float = Field(default=0.3, gt=0)
    """Longest time of one round, seconds."""
    mb: float = Field(default=512.0, gt=0)
    """Most data that one round sends, megabytes."""


class LoopbackTest(DiagnosticTest):
    """Sends bytes from the machine to itself, and compares them."""

    name: ClassVar[Diagnostic] = Diagnostic.LOOPBACK
    does: ClassVar[str] = "sends bytes over TCP to the machine's own address; compares them and measures the bandwidth"
    reasons: ClassVar[tuple[Reason, ...]] = (DAMAGED,)
    limits_type: ClassVar[type[DiagnosticLimits]] = LoopbackLimits

    def run(self) -> DiagnosticResult:
        """Test once."""
        rounds = [self._round() for _ in range(self.limits.rounds)]
        wrong = sum(sent.wrong for sent in rounds)
        if wrong:
            return self.result(self.finding(DAMAGED, self.bench.host, f"{wrong} blocks of 1 MiB"))
        fastest = max(sent.bytes_per_second for sent in rounds)
        measures = {"verified_bytes": float(sum(sent.bytes for sent in rounds)), "bytes_per_second": fastest}
        return self.result(kind=hardware(), measures=measures)

    def _round(self) -> Received:
        with listen(self.bench.host) as listener:
            sending = threading.Thread(target=self._send, args=listener.getsockname()[:2], daemon=True)
            sending.start()
            listener.settimeout(ANSWER_S)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(ANSWER_S)
                received = receive(connection)
            sending.join(ANSWER_S)
        if not received.bytes:
            raise CannotInspect("nothing was sent")
        return received

    def _send(self, host: str, port: int) -> None:
        with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
            send(connection, self.limits.seconds, self.limits.mb * 1e6)
