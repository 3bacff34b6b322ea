"""The stages of an incident, one file each: short functions over one ``Incident``, in the order of their names below.

stop → decide → restore, where state has to be brought to a machine → reattempt →
confirm, again while the policy allows; else park.
"""
