"""The classification of logs and exits: the end of a job, the owner of its fault, and the lines that show both.

Pure, and on the standard library alone, so that it is usable on any log from anywhere
(``docs/concepts/classification.md``).
"""
