"""The ledger's server may have an IPv6 address."""

from __future__ import annotations

import pytest

from activities.ledger.ledger import Ledger
from tests.hosts import IPV6
from tests.postgres import SWITCHED_OFF, SWITCHED_OFF_REASON, Postgres


@IPV6
@pytest.mark.skipif(SWITCHED_OFF, reason=SWITCHED_OFF_REASON)
def test_a_server_with_an_ipv6_address_is_reached() -> None:
    server = Postgres("::1")
    try:
        server.start()
        assert "@[::1]:" in server.url
        with Ledger.open(server.url + "postgres") as ledger:
            assert ledger.jobs() == []
        server.kill()
    finally:
        server.remove()
