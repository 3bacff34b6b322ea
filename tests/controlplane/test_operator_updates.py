"""The message for an operator when a workflow refuses an update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from controlplane.client import Control
from controlplane.operator_updates import ask
from everstep.errors import ConfigError

pytestmark = pytest.mark.asyncio


async def test_a_refusal_is_shown_without_the_errors_class() -> None:
    async def refuse(*_: Any, **__: Any) -> str:
        raise WorkflowUpdateFailedError(ApplicationError("v1 runs already", type="ValueError"))

    handle = SimpleNamespace(execute_update=refuse)
    control = cast(Control, SimpleNamespace(client=SimpleNamespace(get_workflow_handle=lambda _: handle)))

    with pytest.raises(ConfigError) as refused:
        await ask(control, "job/gpt", "update", None, name="job gpt", missing="there is no job gpt")
    assert str(refused.value) == "v1 runs already"
