"""Long runs for developers: the soak, and the sweep (``sweep.py``); ``python -P -m soaks`` runs both.

In a soak faults of every kind meet each other in one long job, for hours.

A *plan* (``plan.py``) is data: episodes of one or two faults each, drawn from the faults of drills
(``draw.py``). A run (``runner.py``) starts one job on a local cluster of its own. Before each episode all
ranks wait at a *gate*, a step at which they wait; there the soak looks from outside at what is (``look.py``),
holds it to a list of invariants (``invariants.py``), and opens the gate. Injector and judge are those of the
drills (``drills``).
"""
