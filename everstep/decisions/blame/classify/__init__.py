"""Logs and exits classified: what ended a job, who owns the fault, and which lines say so.

Pure, and on the standard library alone, so that it is usable on any log from anywhere
(``docs/concepts/classification.md``).
"""
