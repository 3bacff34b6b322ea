"""The pool's poll writes into the ledger which machines returned from quarantine."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from activities.ledger.ledger import Ledger
from activities.pool.look_at_machines import RETURNED, write_returned
from everstep.model.pool import PoolReturn

RETURN = PoolReturn(machine="m3", job="gpt", time_ns=7)


async def test_it_is_written_once_however_often_the_poll_is_repeated(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        for _ in range(2):
            assert await write_returned(ledger, [RETURN]) == ""
        [event] = ledger.machine_events(kind=RETURNED)
    assert (event.machine, event.job, event.time_ns) == ("m3", "gpt", 7)


async def test_a_ledger_that_is_away_is_a_problem_of_the_poll(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
            other.execute("DROP TABLE machine_events")
        assert "the ledger does not have" in await write_returned(ledger, [RETURN])
        assert await write_returned(ledger, []) == ""
