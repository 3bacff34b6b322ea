"""The stages of an incident: functions over one ``Incident``, a file each; *find* is a part of decide, and *backoff* of
reattempt.

stop → evict → decide → diagnose, where the ladder wants it → restore, where state has
to be brought to a machine → reattempt → confirm, again while the policy allows; else park.
"""
