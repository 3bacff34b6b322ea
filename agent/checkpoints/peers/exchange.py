"""This module exchanges training state for all jobs: it has the data port, tokens, and connections to other agents."""

from __future__ import annotations

import asyncio
import threading
import weakref

from agent.checkpoints.peers.cards import Cards
from agent.checkpoints.peers.data_port import DataPort, Tokens
from agent.checkpoints.peers.wire import Wire, connect
from agent.client import AgentClients
from agent.security import ClientSecurity
from agent.v1 import agent_pb2 as pb
from everstep.base.addresses import Address, Ports, parse_address

OPEN_S = 5.0
"""The time limit for the rpc OpenExchange at another agent, seconds."""
CONNECT_S = 3.0
LOOK_S = 0.1
ENDS = "the agent ends, or the connection is not needed any more"


class Exchange:
    """Serves the data port, and connects to the data ports of other agents. It must be made in the running loop.

    Args:
        machine: This machine's name.
        host: Host on which the agent listens; the data port uses it if no card is named.
        cards: The network cards that carry state.
        ports: Ports of the data port.
        security: Certificates and token for calls to other agents.

    Raises:
        OSError: this machine does not have an address, or no port is free.
    """

    def __init__(self, machine: str, host: str, cards: Cards, ports: Ports, security: ClientSecurity) -> None:
        self.tokens = Tokens()
        self.cards = cards
        self.port = DataPort([card.host or host for card in cards.cards], self.tokens, ports, cards.why_not)
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._agents = AgentClients(security)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()

    def opened(self, job: str) -> pb.OpenExchangeReply:
        """Return what another agent needs to connect to the data port."""
        return pb.OpenExchangeReply(token=self.tokens.issue(job), addresses=self.addresses())

    def addresses(self) -> list[pb.DataAddress]:
        """Return the addresses of the data port, one for each network card that carries state."""
        found = zip(self.cards.cards, self.port.addresses, strict=True)
        return [pb.DataAddress(host=card.host, port=listening.port) for card, listening in found]

    def connect(
        self, address: str, job: str, card: int, closing: threading.Event | None = None, *, run: str = ""
    ) -> Wire:
        """Connect to the data port of another agent; called in any thread except the loop's.

        Args:
            address: ``host:port`` of the agent.
            job: Name of the job.
            card: Index of the network card of this machine. At the other machine, the card with this index is used; if
                it has fewer cards, they are used in turn.
            closing: Ends the wait for the agent.
            run: Id of the job's run.

        Raises:
            AgentError: the agent did not answer, does not know the job, or knows another run of the job.
            OSError, WireError: its data port did not answer.
        """
        opening = self._open(address, job, run)
        try:
            answer = asyncio.run_coroutine_threadsafe(opening, self._loop)
        except RuntimeError:
            opening.close()
            raise ConnectionAbortedError(ENDS) from None
        while True:
            try:
                opened = answer.result(LOOK_S)
                break
            except TimeoutError:
                if answer.done():
                    raise
                if self._ended.is_set() or (closing is not None and closing.is_set()):
                    answer.cancel()
                    raise ConnectionAbortedError(ENDS) from None
        there = opened.addresses[card % len(opened.addresses)]
        target = Address(there.host or parse_address(address).host, there.port)
        wire = connect(target, job, opened.token, card=self.cards.cards[card], connect_s=CONNECT_S)
        with self._lock:
            self._wires.add(wire)
            if self._ended.is_set():
                wire.cut()
        return wire

    async def _open(self, address: str, job: str, run: str) -> pb.OpenExchangeReply:
        request = pb.OpenExchangeRequest(job=job, machine=self._machine, run=run)
        return await self._agents.get(address).open_exchange(request, timeout_s=OPEN_S)

    async def reach(self, address: str) -> str:
        """Reach the agent at ``host:port``, and its data port; returns the name of its machine.

        Raises:
            AgentError: the agent did not answer.
            OSError: its data port did not answer.
        """
        described = await self._agents.get(address).describe(timeout_s=CONNECT_S)
        for there in described.data_addresses:
            target = Address(there.host or parse_address(address).host, there.port)
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, writer = await asyncio.open_connection(target.host, target.port)
            except OSError as error:
                reason = error.strerror or f"no answer within {CONNECT_S:g} s"
                raise OSError(f"the data port of another agent cannot be reached: {reason}") from error
            writer.close()
        return described.machine

    async def close(self) -> None:
        """Stop serving; threads that wait for other agents get errors."""
        with self._lock:
            self._ended.set()
            for wire in self._wires:
                wire.cut()
        self.port.close()
        await self._agents.close()
