"""The ledger: a permanent record of what happened to every job.

Temporal keeps histories for days; the ledger keeps jobs, incidents and
intervals for ever, and their details for a year, in SQLite or PostgreSQL::

    ledger = Ledger.open("sqlite:////var/lib/everstep/ledger.db")     # synchronous, for the command line
    await ledger.call(Ledger.job_ended, "gpt", ended_ns=now, outcome="finished")   # from an async activity

A write may be repeated, and two attempts of a write may overlap, because a stored value is never overwritten.
"""
