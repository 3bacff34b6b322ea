"""One running agent for each module, and keys for TLS.

The agent's fork servers are forked from the template of all tests. In a module with ``ALONE = True``, the agent starts
its fork servers itself.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.agent.agents import HOST, RunningAgent, running_agent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningAgent]:
    alone = getattr(request.module, "ALONE", False)
    async with running_agent(tmp_path_factory.mktemp("agent"), "--prewarm", alone=alone) as running:
        yield running


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a self-signed certificate, and a token."""
    folder = tmp_path_factory.mktemp("keys")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
            *("-subj", "/CN=m1", "-addext", f"subjectAltName=IP:{HOST}"),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "token").write_text("secret\n")
    (folder / "wrong").write_text("guessed\n")
    return folder
