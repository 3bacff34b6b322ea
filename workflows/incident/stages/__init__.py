"""The stages of an incident, each a function in a file; ``workflows/incident/workflow.py`` describes their order.

The stage *find* is in ``decide.py``; *backoff* and *confirm* are in ``reattempt.py``.
"""
