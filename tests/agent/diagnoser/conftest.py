"""A process for each module, from which the module's tests fork."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agent.diagnoser.forked import Run, forked_tests


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with forked_tests(tmp_path_factory.mktemp("disk")) as run:
        yield run
