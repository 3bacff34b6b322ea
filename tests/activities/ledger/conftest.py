"""Fixtures for tests of the ledger. Each test runs on SQLite, and on a temporary PostgreSQL cluster."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.ledger.ledger import Ledger
from tests.postgres import SWITCHED_OFF, SWITCHED_OFF_REASON, Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a temporary PostgreSQL cluster, without the database's name."""
    server = Postgres()
    try:
        server.start()
        try:
            yield server.url
        finally:
            server.kill()
    finally:
        server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new, empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    if SWITCHED_OFF:
        pytest.skip(SWITCHED_OFF_REASON)
    import psycopg

    server: str = request.getfixturevalue("postgres")
    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server + name


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """An open ledger."""
    with Ledger.open(url) as opened:
        yield opened
