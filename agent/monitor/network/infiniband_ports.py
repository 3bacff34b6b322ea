"""This module reads the ports of InfiniBand and RoCE devices from /sys/class/infiniband.

The names of files are from the kernel's ``sysfs-class-infiniband``; the names of measures are from node_exporter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "class/infiniband"
ACTIVE = 4
"""``state`` of a port that carries traffic."""
WORD_BYTES = 4
"""Unit of ``port_xmit_data`` and ``port_rcv_data``."""
GIGABIT = 10**9

COUNTERS = {
    "counters/link_downed": ("link_downed_total", "how often the link went down"),
    "counters/link_error_recovery": ("link_error_recovery_total", "how often the link recovered from errors"),
    "counters/symbol_error": ("symbol_error_total", "damage on the link"),
    "counters/port_rcv_errors": ("port_errors_received_total", "packets received damaged"),
    "counters/port_xmit_discards": ("port_discards_transmitted_total", "packets that were not sent"),
    "counters/port_xmit_wait": ("port_transmit_wait_total", "ticks in which the port had data and could not send"),
    "counters/local_link_integrity_errors": ("local_link_integrity_errors_total", "damage on the link, over a limit"),
    "counters/excessive_buffer_overrun_errors": ("excessive_buffer_overrun_errors_total", "overruns of buffers"),
    "counters/port_rcv_data": ("port_data_received_bytes_total", "bytes received, RDMA included"),
    "counters/port_xmit_data": ("port_data_transmitted_bytes_total", "bytes sent, RDMA included"),
    "hw_counters/local_ack_timeout_err": ("local_ack_timeout_errors_total", "the other end did not answer"),
    "hw_counters/rnr_nak_retry_err": ("rnr_nak_retry_errors_total", "the other end had no free buffer"),
    "hw_counters/out_of_sequence": ("out_of_sequence_packets_received_total", "packets that arrived out of sequence"),
    "hw_counters/packet_seq_err": ("packet_sequence_errors_total", "packets that the other end did not get"),
    "hw_counters/roce_slow_restart": ("roce_slow_restart_total", "slow restarts of RoCE"),
}
"""File → name of the measure, without the prefix ``node_infiniband_``, and its meaning."""
DATA = ("port_rcv_data", "port_xmit_data")


@dataclass(frozen=True, slots=True)
class Port:
    """The state of a port at one inspection."""

    device: str
    number: str
    state: int = 0
    """1 down, 2 init, 3 armed, 4 active; 0: the driver does not report it."""
    physical_state: int = 0
    """2 polling, 3 disabled, 5 link up, …"""
    rate: float = 0.0
    """Bits per second; 0: the driver does not report it."""
    link_layer: str = ""
    """``InfiniBand`` or ``Ethernet``."""
    counters: dict[str, float] = field(default_factory=dict)
    """File name → value (data in bytes), without counters that the driver does not have."""

    @property
    def name(self) -> str:
        """Device and port number."""
        return f"{self.device} port {self.number}"


def ports(sys: Path) -> dict[str, Port]:
    """Return all ports by name; empty if the machine has no such device.

    Raises:
        OSError: the ports cannot be listed.
    """
    folder = sys / FOLDER
    if not folder.is_dir():
        return {}
    found = [_port(path) for device in sorted(folder.iterdir()) for path in sorted((device / "ports").glob("*"))]
    return {port.name: port for port in found}


def number_at_start(text: str) -> float | None:
    """Parse the number at the start: 4 from ``4: ACTIVE``, 400.0 from ``400 Gb/sec (4X NDR)``; None: there is none."""
    first = text.replace(":", " ").split()
    try:
        return float(first[0])
    except (ValueError, IndexError):
        return None


def _port(path: Path) -> Port:
    counters = {}
    for file in COUNTERS:
        name = file.partition("/")[2]
        value = number_at_start(_read(path / file))
        if value is not None:
            counters[name] = value * WORD_BYTES if name in DATA else value
    return Port(
        device=path.parent.parent.name,
        number=path.name,
        state=int(number_at_start(_read(path / "state")) or 0),
        physical_state=int(number_at_start(_read(path / "phys_state")) or 0),
        rate=(number_at_start(_read(path / "rate")) or 0.0) * GIGABIT,
        link_layer=_read(path / "link_layer").strip(),
        counters=counters,
    )


def _read(path: Path) -> str:
    """Return a file's text; empty if the driver has no such file, or returns an error."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
