"""The NIC test sends TCP data between two machines in both directions, through the interfaces of their agents."""

from __future__ import annotations

import socket
from typing import ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import hardware
from agent.diagnoser.network.stream import Received, greet, receive, send
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Health, Owner, Reason
from everstep.system.listening import listen

FAILED = Reason(
    "nic-failed",
    "bytes cannot be sent from this machine to another one and back",
    owner=Owner.NETWORK,
    verdict=Health.UNKNOWN,
)
DAMAGED = Reason(
    "nic-damaged", "bytes from another machine arrive changed", owner=Owner.NETWORK, verdict=Health.UNKNOWN
)


class NicLimits(DiagnosticLimits):
    """Limits of the test between the interfaces of two machines."""

    deadline_s: float = Field(default=30.0, gt=0)
    """The test is killed after this time, seconds."""
    seconds: float = Field(default=1.0, gt=0)
    """Longest time in each direction, seconds."""
    mb: float = Field(default=4096.0, gt=0)
    """Most data in each direction, megabytes."""
    answer_s: float = Field(default=5.0, gt=0)
    """If a connection is not made or makes no progress for this long, it has failed, seconds."""


class NicTest(DiagnosticTest):
    """Sends bytes to another machine and back, and compares them."""

    name: ClassVar[Diagnostic] = Diagnostic.NIC
    does: ClassVar[str] = "sends bytes over TCP to another machine and back; compares them and measures the bandwidth"
    reasons: ClassVar[tuple[Reason, ...]] = (FAILED, DAMAGED)
    limits_type: ClassVar[type[DiagnosticLimits]] = NicLimits

    def run(self) -> DiagnosticResult:
        """Test once."""
        try:
            received = self._exchanged()
        except OSError as error:
            return self.result(self.finding(FAILED, "", str(error), text=f"{FAILED.means}: {error}"))
        if received.wrong:
            return self.result(self.finding(DAMAGED, "", f"{received.wrong} blocks of 1 MiB"))
        measures = {"verified_bytes": float(received.bytes), "bytes_per_second": received.bytes_per_second}
        return self.result(kind=hardware(), measures=measures)

    def _exchanged(self) -> Received:
        limits = self.limits
        with self._connected() as connection:
            connection.settimeout(limits.answer_s)
            greet(connection, self.peer.secret, self.peer.position)
            if self.peer.position:
                send(connection, limits.seconds, limits.mb * 1e6)
                return receive(connection)
            received = receive(connection)
            send(connection, limits.seconds, limits.mb * 1e6)
            return received

    def _connected(self) -> socket.socket:
        own = self.bench.host
        if self.peer.position:
            return socket.create_connection((self.peer.host, self.peer.port), self.limits.answer_s, (own, 0))
        with listen(own) as listener:
            listener.settimeout(self.limits.deadline_s / 2)  # the other machine begins once this machine waits
            self.bench.waits_at(listener.getsockname()[1])
            connection, _ = listener.accept()
            return connection
