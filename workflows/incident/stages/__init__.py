"""The stages of an incident: a function and a file each; *find* belongs to decide, and *backoff* to
reattempt.

The order is stop → evict → decide → diagnose, if the ladder wants it → restore, if state
must be moved to a machine → reattempt → confirm. It is repeated while the policy allows; else park.
"""
