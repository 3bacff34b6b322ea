"""If the worker has a key, all data of a job that Temporal stores are encrypted, even errors."""

from __future__ import annotations

import dataclasses
import uuid

import pytest
from temporalio.client import Client
from temporalio.converter import DefaultFailureConverterWithEncodedAttributes
from temporalio.worker import Worker

from activities.payload_keys import Keys
from activities.payloads import DATA_CONVERTER, Codec
from everstep.errors import ConfigError
from everstep.model.evidence import Evidence
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, incident_workflow_id, job_workflow_id
from tests.workflows.conftest import MACHINES, Jobs, ScriptedCluster, anomaly, exits, held
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

SECRET = b"very-secret-indeed"


def client_of(temporal: Client, keys: Keys | None) -> Client:
    converter = dataclasses.replace(
        DATA_CONVERTER,
        payload_codec=Codec(keys),
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )
    return Client(temporal.service_client, namespace=temporal.namespace, data_converter=converter)


async def test_without_the_key_no_data_of_a_job_can_be_read(temporal: Client) -> None:
    client = client_of(temporal, Keys({"k1": bytes(range(32))}))
    cluster, queue, name = ScriptedCluster(), f"q-{uuid.uuid4().hex[:8]}", f"job-{uuid.uuid4().hex[:8]}"
    ends = [end.model_copy(update={"log_tail": SECRET.decode()}) for end in exits(20)]
    cluster.evidence = lambda given: Evidence(generation=given.generation, exits=ends, held=held(20))
    spec = JobSpec(name=name, script="/job.py", machines=2, env={"HF_TOKEN": SECRET.decode()})
    async with Worker(
        client,
        task_queue=queue,
        workflows=list(WORKFLOWS),
        activities=cluster.activities,
        workflow_runner=sandbox(),
        max_cached_workflows=0,
    ):
        handle = await client.start_workflow(
            JobWorkflow.run, JobState(spec=spec, machines=MACHINES), id=job_workflow_id(name), task_queue=queue
        )
        jobs = Jobs(client, cluster, queue)
        await jobs.until(handle, lambda state: state.status == "running")
        await handle.execute_update(JobWorkflow.report, anomaly())
        state = await jobs.until_runs(handle, 2)
        assert state.spec.env == spec.env
        assert [one.resolution for one in state.incidents] == ["reattempt"]
        incident = client.get_workflow_handle(incident_workflow_id(name, 1))
        with pytest.raises(ConfigError, match="encrypted with key 'k1'"):
            await client_of(temporal, None).get_workflow_handle(incident.id).result()
        for workflow in (handle, incident):
            events = [event async for event in workflow.fetch_history_events()]
            assert len(events) > 10
            assert not [event.event_id for event in events if SECRET in event.SerializeToString()]
        await handle.terminate()
