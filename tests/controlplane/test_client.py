"""What a client of a cluster refuses before it sends a request to Temporal."""

from __future__ import annotations

import pytest
from temporalio.client import Client

from controlplane.client import Control
from everstep.errors import ConfigError
from everstep.model.job import JobSpec, replay_name


async def test_no_job_takes_the_name_of_a_replay(temporal: Client) -> None:
    """Agents end replays together with their job. So they would end a job that has such a name."""
    spec = JobSpec(name=replay_name("gpt", "row 1"), script="/train.py")
    async with Control(temporal, None) as control:
        with pytest.raises(ConfigError, match=r"names a replay of the job 'gpt': use a name without '~'"):
            await control.start_job(spec, [])
