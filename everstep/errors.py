"""The errors of everstep.

::

    EverstepError
    ├── ConfigError          a job file, an option or an environment variable is wrong
    │   ├── NoSuchJob           nothing runs, or ever ran, by that name
    │   └── NoSuchFolder        the folder of a job's code is not on this machine
    ├── TopologyError        sizes that do not multiply, a rank that does not exist
    ├── CheckpointError      a checkpoint buffer cannot be written or read
    │   ├── CorruptCheckpoint   its header, length or checksum does not hold
    │   └── CopyInterrupted     a file on its way was given up
    ├── AgentError           a node agent refused a command or did not answer
    │   ├── AgentUnreachable
    │   ├── UnknownJob       the job was not prepared on this machine
    │   ├── CodeMissing      the snapshot of code is not on this machine: bring it there, and ask again
    │   ├── StillDying       ranks were killed and are not gone yet: ask again
    │   ├── Fenced           the command belongs to a generation that was stopped
    │   ├── ForkServerLost   the fork server died while it was needed
    │   ├── CannotLook       an inspection of the machine cannot look
    │   ├── WireError        who is at the other end of a data port broke the protocol
    │   └── BackupRefused    an offer of a backup is not taken
    ├── ClusterError         the local cluster cannot be started or is not up
    │   ├── TreeUnknown      which processes are the cluster's is not known
    │   └── SoakStuck        the job of a soak does not come to its next gate
    ├── CannotInject         a fault is known and cannot be injected here
    │   └── NoCluster        the cluster of a drill does not come up (a ClusterError too)
    ├── DumpError            a dump, record or table of timings cannot be read
    ├── LedgerError          the ledger cannot be opened or migrated
    ├── DamagedCode          an archive of code is not what its digest says
    ├── VersionStoreError    the store of versions does not answer, or lacks what is asked for
    └── NoticeError          a receiver did not take a notice

A message says what was wrong, with which value, and what to do. ``agent/statuses.py`` has the gRPC statuses that stand
for them between agent and control plane.
"""


class EverstepError(Exception):
    """Base of all errors that everstep raises on purpose."""


class ConfigError(EverstepError):
    """A job file, an option or an environment variable is wrong."""


class NoSuchFolder(ConfigError):
    """There is no folder of that name on this machine, for the code of a job."""


class NoSuchJob(ConfigError):
    """Temporal knows no workflow of that id."""


class TopologyError(EverstepError):
    """Sizes do not multiply, or a rank or machine does not exist."""


class CheckpointError(EverstepError):
    """A checkpoint buffer cannot be written or read."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint's header, length or checksum does not hold."""


class CopyInterrupted(CheckpointError):
    """A file on its way was given up: the job, its generation or the agent ends."""


class AgentError(EverstepError):
    """A node agent refused a command."""


class AgentUnreachable(AgentError):
    """A node agent did not answer."""


class UnknownJob(AgentError):
    """The job was not prepared on this machine, or what was asked for is not there."""


class CodeMissing(AgentError):
    """The snapshot of code is not on this machine: bring it there, and ask again."""


class StillDying(AgentError):
    """Ranks were killed and are not gone yet, which can take minutes: ask again."""


class Fenced(AgentError):
    """The command belongs to a generation that was stopped."""


class ForkServerLost(AgentError):
    """The fork server died while it was needed."""


class CannotLook(AgentError):
    """An inspection cannot look: a tool is missing, denied or silent. That is no fault of the machine."""


class WireError(AgentError):
    """The other side of a data port broke the protocol, or does not know the token."""


class BackupRefused(AgentError):
    """An offer is not taken, for a reason that another offer may not meet.

    ``newest`` is the step that is held already and is not older; -1: that is not why.
    """

    def __init__(self, reason: str, newest: int = -1) -> None:
        super().__init__(reason)
        self.newest = newest


class ClusterError(EverstepError):
    """The local cluster cannot be started or is not up."""


class TreeUnknown(ClusterError):
    """The supervisor is not there, so that it is not known which processes are the cluster's."""


class SoakStuck(ClusterError):
    """The job of a soak does not come to the next gate; the message says how it stands."""


class CannotInject(EverstepError):
    """A fault that is known but cannot be injected here; the message says why."""


class NoCluster(CannotInject, ClusterError):
    """The cluster of a drill does not come up; the message says why."""


class DumpError(EverstepError):
    """A dump, record or table that an analysis reads is not what it is taken for."""


class LedgerError(EverstepError):
    """The ledger cannot be opened or migrated."""


class DamagedCode(EverstepError):
    """An archive of code is not what its digest says."""


class VersionStoreError(EverstepError):
    """The store of versions does not answer, or lacks what is asked for; the message says which, and what to do."""


class NoticeError(EverstepError):
    """A receiver did not take a notice; the message says why."""
