"""The activities that write the ledger."""

from __future__ import annotations

from activities.ledger.ledger import Ledger
from activities.write_to_ledger import RecordJob
from everstep.model.job import JobSpec
from everstep.model.launch import Launched
from tests.activities.performing import perform


async def test_the_ledger_keeps_where_the_backups_of_a_generation_lay(ledger: Ledger) -> None:
    launched = Launched(generation=1, resume_step=-1, started_ns=5, backups="losing both costs steps")
    given = RecordJob(spec=JobSpec(name="gpt", script="/job.py"), time_ns=9, started_ns=4, launched=launched)

    await perform(given, ledger=ledger)

    [generation] = await ledger.call(Ledger.generations, "gpt")
    assert generation.reason == "backups: losing both costs steps"
