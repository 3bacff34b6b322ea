"""Long runs for developers: the soak and the sweep. ``python -P -m soaks`` runs both.

In a soak, faults of every kind meet each other in one long job, for hours. Its *plan* (``plan.py``) is data: episodes
of one or two faults each, drawn from the faults of drills (``draw.py``). A soak (``runner.py``) runs the job on a local
cluster of its own. Before each episode all ranks wait at a step, the *gate*. There the soak observes the job from
outside (``observe.py``), checks a list of invariants (``invariants.py``), and opens the gate. Faults are injected and
judged as in drills. The sweep (``sweep.py``) kills a worker at every event of an incident's history.
"""
