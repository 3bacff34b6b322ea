"""The classification of logs and exit codes shows why a job ended, who owns the fault, and which lines show that.

It needs only Python's standard library, and works on any log (``docs/concepts/classification.md``).
"""
