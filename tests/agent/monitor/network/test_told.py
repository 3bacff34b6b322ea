"""The monitor reports alerts of a real link at once. The monitor's threads run here as in production."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from agent.monitor.inspection import Site
from agent.monitor.kept import KeptStates
from agent.monitor.monitor import Monitor
from agent.monitor.network.link import LinkInspection, LinkLimits
from everstep.model.finding import Finding
from tests.agent.agents import until
from tests.agent.monitor.network.conftest import Ip


async def test_each_alert_is_reported_at_once(ip: Ip, tmp_path: Path) -> None:
    """The interval of looks is so long that only a notification of the kernel can lead to a report."""
    told: list[tuple[str, str]] = []

    def tell(finding: Finding, over: bool) -> None:
        assert not over
        told.append((finding.reason, finding.verdict))

    kept = KeptStates(tmp_path, boot="this one")
    inspection = LinkInspection(Site(host="10.98.0.1"), LinkLimits(interval_s=600, down_s=0.3), {}, same_boot=True)
    monitor = Monitor([inspection], kept, tell)

    async def outage(expected: list[str]) -> None:
        begun = len(told)
        ip("link set far0 down")
        await until(lambda: len(told) >= begun + len(expected), f"{expected} are told")
        ip("link set far0 up")
        await until(
            lambda: bool(monitor.states()[0].result.measures['node_network_up{device="eth0"}']), "the link is up again"
        )
        assert [reason for reason, _ in told[begun:]] == expected

    running = asyncio.create_task(monitor.run())
    try:
        await until(lambda: monitor.inspectors[0].inspections > 0, "the inspection has looked once")
        await outage(["nic-flap", "nic-down"])
        await outage(["nic-flap-repeated"])
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert dict(told) == {"nic-flap": "unknown", "nic-down": "faulty", "nic-flap-repeated": "unknown"}
