"""Names of the environment variables between agent, rank and training library.

The agent sets them; the training library and the fault hook read them. Beside
them every rank gets torchrun's own variables.
"""

JOB = "EVERSTEP_JOB"
MACHINE = "EVERSTEP_MACHINE"
CLUSTER = "EVERSTEP_CLUSTER"
GENERATION = "EVERSTEP_GENERATION"
REPORT_FILE = "EVERSTEP_REPORT_FILE"
"""Mapped file into which the rank writes its step reports."""
CHECKPOINT_FILE = "EVERSTEP_CHECKPOINT_FILE"
"""Mapped file that holds the rank's checkpoint slots."""
CHECKPOINT_SLOTS = "EVERSTEP_CHECKPOINT_SLOTS"
CHECKPOINT_OVERLAP = "EVERSTEP_CHECKPOINT_OVERLAP"
"""``1``: copies overlap the next forward and backward; ``0``: training waits for them."""
CHECKPOINT_BELL = "EVERSTEP_CHECKPOINT_BELL"
"""FIFO that tells the agent of a committed save: one byte each, written without waiting, for any reader or none."""
BACKUP_SLOTS = "EVERSTEP_BACKUP_SLOTS"
"""Slots of each backup that this machine holds for others, to compute the room that is needed; 0: no backups."""
RESHARD_FROM = "EVERSTEP_RESHARD_FROM"
"""Folder of a checkpoint on disk that was saved with other parallel sizes, to start from."""
RESUME_STEP = "EVERSTEP_RESUME_STEP"
"""Completed steps of the state to restore; 0 from the beginning, -1 nothing agreed."""
TOPOLOGY = "EVERSTEP_TOPOLOGY"
"""``machines,ranks_per_machine,tp,pp,order`` e.g. ``4,2,2,2,pp-dp-tp``."""
FAULTS = "EVERSTEP_FAULTS"
"""File with the faults to inject (drills only); see everstep/faults.py."""
