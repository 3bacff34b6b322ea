"""The classification of logs and exit codes: why a job ended, who owns the fault, and the lines that show it.

It needs only the standard library, so that it works on any log (``docs/concepts/classification.md``).
"""
