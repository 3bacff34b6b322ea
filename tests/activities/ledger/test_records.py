"""The activities that write the ledger."""

from __future__ import annotations

from temporalio.testing import ActivityEnvironment

from activities.ledger import Ledger
from activities.ledger.activities import RecordActivities
from activities.messages import RecordInput
from everstep.model.job import JobSpec
from everstep.model.launch import Launched


async def test_the_ledger_keeps_where_the_backups_of_a_generation_lay(ledger: Ledger) -> None:
    launched = Launched(generation=1, resume_step=-1, started_ns=5, backups="losing both costs steps")
    given = RecordInput(spec=JobSpec(name="gpt", script="/job.py"), time_ns=9, started_ns=4, launched=launched)

    await ActivityEnvironment().run(RecordActivities(ledger).record, given)

    [generation] = await ledger.call(Ledger.generations, "gpt")
    assert generation.reason == "backups: losing both costs steps"
