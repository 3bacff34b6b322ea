"""Fixtures for all tests: a real Temporal server, found or built as for users."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.payloads import DATA_CONVERTER
from console.local import temporal_binary
from console.local.temporal_server import DYNAMIC_CONFIG
from workflows import attributes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drills first: they take longest, and side by side nothing else should be left to wait for at the end."""
    items.sort(key=lambda item: item.get_closest_marker("drill") is None)


@pytest.fixture
async def temporal() -> AsyncIterator[Client]:
    """A client of a fresh in-memory server with the settings of the embedded one."""
    found = temporal_binary.installed(print) or temporal_binary.obtain(print)
    # A low limit lets a test see continue-as-new after a few incidents instead of thousands.
    limits = {"limit.historyCount.suggestContinueAsNew": "100"}
    settings = [
        part for pair in (DYNAMIC_CONFIG | limits).items() for part in ("--dynamic-config-value", "=".join(pair))
    ]
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(found[0]),
        dev_server_startup_timeout=timedelta(seconds=60),
        dev_server_extra_args=settings,
        search_attributes=attributes.ALL,
        data_converter=DATA_CONVERTER,
    ) as environment:
        yield environment.client
