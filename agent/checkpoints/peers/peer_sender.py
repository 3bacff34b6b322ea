"""This module sends the saves of some ranks to one peer machine, from one network card and in a thread of its own.

A large slot is sent over several connections at once. They stay open for the next slots.

Normally it sends every step that it can. When machines are aligned (``everstep/decisions/keep/align_backups.py``), it
sends only the named step, and nothing more until it is notified that all ranks have that step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.peers.align import apply, kept, lost, pending, pins, remember
from agent.checkpoints.peers.copy_requests import Header, Offer, as_message
from agent.checkpoints.peers.own_slots import on_own_file
from agent.checkpoints.peers.rate_limit import Limiter
from agent.checkpoints.peers.send_slot import Fate, Outcome, PeerConnection, put
from agent.checkpoints.peers.wire import Wire
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.align_backups import HANG_S, HANG_STEPS, NO_NAMED_STEP
from everstep.decisions.keep.disk_schedule import StepRate
from everstep.decisions.keep.next_copy import next_step_to_send, next_stride
from everstep.errors import AgentError, CorruptCheckpoint
from everstep.slots.format import EMPTY, Pin, SlotHeader, own_slots
from everstep.slots.reader import SlotReader
from everstep.system.bulk_threads import yield_the_core

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 5.0
"""The shortest and the longest wait before a peer that failed is tried again, seconds."""
JOIN_S = 1.0
"""The longest wait for the end of the thread, seconds; a thread that waits for a connection ends later."""
LET_GO_S = 60.0
"""If no backup has succeeded for this long, seconds, a rank may overwrite the slot with the step of the newest backup,
unless all ranks are known to have that step. The slot can then hold a step that other ranks still have to save."""
DEFAULT_PIECE = 4 << 20

ConnectTo = Callable[[str, str, int, threading.Event], Wire]
"""``connect(address, job, card, closing)``: connect to another agent's data port, by the card with this index."""

logger = structlog.get_logger()


class PeerSender:
    """Sends the saves of some ranks to one peer machine, in a thread of its own."""

    def __init__(
        self,
        place: Place,
        launch: LaunchOptions,
        *,
        machine: str,
        address: str,
        card: int,
        ranks: Sequence[int],
        connect: ConnectTo,
        limits: Sequence[Limiter],
    ) -> None:
        self.ranks = ranks
        self._place = place
        self._launch = launch
        self._machine = machine
        self._address = address
        self._card = card
        self._connect = connect
        self._limits = limits
        self._piece = int(launch.options.backup_chunk_mb * 1e6) or DEFAULT_PIECE
        self._connections = max(1, launch.options.transfer_connections)
        self._readers: dict[int, SlotReader] = {}
        self._sent = dict.fromkeys(ranks, -1)
        self._every = max(1, launch.options.backup_every_steps)
        self._stride = 1
        self._pace = StepRate()
        self._sending: dict[int, int] = {}
        """Rank → the step that is being sent."""
        self._kept_at = time.monotonic()
        self._let_go = False
        self._spoiled: set[tuple[int, SlotHeader]] = set()
        self._open: list[PeerConnection] = []
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"backups to {machine}", daemon=True)
        self._log = logger.bind(job=place.job, peer=machine)
        for rank in ranks:
            self._remember(rank)

    def start(self) -> None:
        """Start the thread; it begins with the saves that exist already."""
        self._due.set()
        self._thread.start()

    def align(self, rank: int, request: pb.AlignBackupsRequest) -> None:
        """Back up the step that all machines back up, or any step again."""
        self._place.saved.change(rank, partial(apply, request=request))
        self.spare(rank)
        self.wake()

    def wake(self) -> None:
        """Wake the thread: there may be something to send."""
        self._due.set()

    def end(self) -> None:
        """Break off and end the thread."""
        self._closing.set()
        self._due.set()
        with self._lock:
            for one in self._open:
                one.wire.cut()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        yield_the_core()
        retry_s = FIRST_RETRY_S
        while True:
            # A sender that skips steps checks from time to time whether the job hangs at a skipped step.
            self._due.wait(HANG_S if self._stride > 1 else None)
            self._due.clear()
            if self._closing.is_set():
                break
            if self._try():
                retry_s = FIRST_RETRY_S
            else:
                self._let_go = time.monotonic() - self._kept_at > LET_GO_S
                for rank in self.ranks:
                    self.spare(rank)
                self._closing.wait(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
                self._due.set()
        self._disconnect()
        for reader in self._readers.values():
            reader.close()

    def _try(self) -> bool:
        """Send the slots that are due; the thread survives any error, because backups must not end silently."""
        try:
            return self._send_what_is_due()
        except Exception as error:
            self._log.error("backups fail", exc_info=error)
            self._disconnect()
            self._problem(self.ranks, f"no backup to {self._machine}: {type(error).__name__}: {error}")
            return False

    def _send_what_is_due(self) -> bool:
        """Send the slots that are due; returns whether the next try may follow without a wait."""
        held = self._held()
        due = self._choose(held)
        if not due:
            return True
        self._due.set()  # check again afterwards: more slots may have been saved
        self._sending = {rank: header.completed_steps for rank, header in due.items()}
        try:
            for rank in due:
                self.spare(rank)
            fine, newest = self._send_all(due)
        finally:
            sending, self._sending = self._sending, {}
            for rank in due:
                self.spare(rank)
        if all(self._sent[rank] >= step for rank, step in sending.items()):
            self._stride = next_stride(self._stride, self._every, newest - _newest(held))
        return fine

    def _choose(self, held: Mapping[int, Mapping[int, SlotHeader]]) -> dict[int, SlotHeader]:
        """Choose the slots to send now, by rank."""
        named = {rank: name for rank in self.ranks if (name := pending(self._state(rank)))}
        due = {rank: held[rank][name] for rank, name in named.items() if name in held[rank]}
        for rank in named.keys() - due.keys():
            if max(held[rank], default=-1) > named[rank]:
                self._place.saved.change(rank, partial(lost, named=named[rank]))
                self.spare(rank)
        steps = {rank: list(slots) for rank, slots in held.items() if self._state(rank).backup_named == NO_NAMED_STEP}
        now_ns, resumed = time.monotonic_ns(), self._launch.resume_step
        self._pace.observe(now_ns, _newest(held))
        stride = 1 if self._pace.is_hung(now_ns, HANG_S, HANG_STEPS) else self._stride
        step = next_step_to_send(steps, self._sent, every=self._every, stride=stride, resumed=resumed)
        if step is not None:
            due |= {rank: held[rank][step] for rank in steps if step in held[rank] and self._sent[rank] < step}
        return due

    def _send_all(self, due: Mapping[int, SlotHeader]) -> tuple[bool, int]:
        """Return whether the next try may follow without a wait, and the newest step saved during the transfer."""
        fine, newest = True, -1
        for rank, header in due.items():
            if self._closing.is_set():
                return True, newest
            try:
                outcome = self._send(rank, header)
                newest = max([newest, *self._slots(rank)])
                fine = self._settle(rank, header, outcome) and fine
            except (OSError, AgentError) as error:
                self._disconnect()
                self._problem(self.ranks, f"no backup to {self._machine} at {self._address}: {error}")
                return False, newest
        return fine, newest

    def _held(self) -> dict[int, dict[int, SlotHeader]]:
        """Return rank → step → header of the own slots."""
        return {rank: self._slots(rank) for rank in self.ranks}

    def _slots(self, rank: int) -> dict[int, SlotHeader]:
        with contextlib.suppress(OSError, CorruptCheckpoint):  # nothing is saved yet, or the file is replaced
            reader = self._readers.get(rank)
            if reader is None:
                reader = self._readers[rank] = SlotReader(own_slots(self._place.shm, rank), self._place.owner(rank))
            headers = [header for header in reader.headers() if (rank, header) not in self._spoiled]
            return {header.completed_steps: header for header in headers}
        return {}

    def _send(self, rank: int, header: SlotHeader) -> Outcome:
        reader = self._readers[rank]
        offer = Offer(
            machine=self._place.machine,
            rank=rank,
            generation=self._launch.generation,
            resume_step=self._launch.resume_step,
            slots=max(2, self._launch.options.backup_slots),
            keep=self._state(rank).backup_whole,
            header=Header(**as_message(header)),
        )
        fresh = not self._open
        try:
            return self._put(reader, header, offer)
        except (OSError, AgentError):
            if fresh or self._closing.is_set():
                raise
            self._disconnect()  # the peer's agent may have been restarted since the last backup
            return self._put(reader, header, offer)

    def _put(self, reader: SlotReader, header: SlotHeader, offer: Offer) -> Outcome:
        return put(
            self._connected,
            reader,
            header,
            offer,
            connections=self._connections,
            limits=self._limits,
            closing=self._closing,
        )

    def _settle(self, rank: int, header: SlotHeader, outcome: Outcome) -> bool:
        """Record the outcome of an offered slot; returns False if the next try must wait."""
        match outcome.fate:
            case Fate.KEPT:
                self._kept(rank, header.completed_steps)
            case Fate.REFUSED if outcome.newest >= 0:
                self._kept(rank, outcome.newest)
            case Fate.REFUSED:
                self._problem([rank], f"{self._machine} refused the backup of rank {rank}: {outcome.reason}")
                return False
            case Fate.DAMAGED:
                self._spoiled.add((rank, header))
                self._problem([rank], f"no backup of step {header.completed_steps} of rank {rank}: {outcome.reason}")
            case Fate.GONE:
                pass
        return True

    def _kept(self, rank: int, step: int) -> None:
        """Record that the peer has a step.

        Its slot is spared until the peer has a newer step. If machines are aligned, it is spared until every rank has
        a newer step.
        """
        self._sent[rank] = max(self._sent[rank], step)
        self._kept_at, self._let_go = time.monotonic(), False
        if not self._closing.is_set():
            self._place.saved.update(rank, backup_problem="")
            self._place.saved.change(rank, partial(kept, step=step, every=self._every))
        self.spare(rank)

    def spare(self, rank: int) -> None:
        """Pin the slots that the rank's saves should spare; called in any thread."""

        def pin(reader: SlotReader) -> None:
            sending, sent = self._sending.get(rank, EMPTY), EMPTY if self._let_go else self._sent[rank]
            for why, step in pins(self._state(rank), sending, sent):
                reader.pin(why, step)

        with self._lock:
            if not self._closing.is_set():
                on_own_file(self._place, rank, pin)

    def _remember(self, rank: int) -> None:
        """Restore the named and the complete step from the rank's pins after a restart of the agent."""

        def look(reader: SlotReader) -> None:
            self._place.saved.change(rank, partial(remember, pinned={why: reader.pinned(why) for why in Pin}))
            self._sent[rank] = self._state(rank).backup_step

        on_own_file(self._place, rank, look)

    def _state(self, rank: int) -> pb.SavedState:
        return self._place.saved.of(rank)

    def _problem(self, ranks: Sequence[int], text: str) -> None:
        if self._closing.is_set():
            return
        for rank in ranks:
            if self._state(rank).backup_problem != text:
                self._place.saved.update(rank, backup_problem=text)
                self._log.warning("backups do not go through", rank=rank, reason=text)

    def _connected(self, count: int) -> list[PeerConnection]:
        """Return this many connections, which are made unless they exist."""
        while len(self._open) < count:
            wire = self._connect(self._address, self._place.job, self._card, self._closing)
            with self._lock:
                self._open.append(PeerConnection(wire, memoryview(bytearray(self._piece))))
                if self._closing.is_set():
                    wire.cut()
        return self._open[:count]

    def _disconnect(self) -> None:
        with self._lock:
            opened, self._open = self._open, []
        for one in opened:
            one.wire.close()


def _newest(held: Mapping[int, Mapping[int, SlotHeader]]) -> int:
    return max((step for slots in held.values() for step in slots), default=-1)
