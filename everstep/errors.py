"""The errors of everstep.

::

    EverstepError
    ├── ConfigError          a job file, an option or an environment variable is wrong
    │   ├── NoSuchJob           nothing runs, or ever ran, by that name
    │   └── NoSuchFolder        the folder of a job's code is not on this machine
    ├── TopologyError        sizes that do not multiply, a rank that does not exist
    ├── CheckpointError      a checkpoint buffer cannot be written or read
    │   ├── CorruptCheckpoint   its header, length or checksum is wrong
    │   └── CopyInterrupted     a file on its way was given up
    ├── AgentError           a node agent refused a command or did not answer
    │   ├── AgentUnreachable
    │   ├── UnknownJob       the job was not prepared on this machine
    │   ├── CodeMissing      the snapshot of code is not on this machine: bring it there, and ask again
    │   ├── StillDying       ranks were killed and are not gone yet: ask again
    │   ├── Fenced           the command belongs to a generation that was stopped
    │   ├── ForkServerLost   the fork server died while it was needed
    │   ├── CannotInspect       an inspection cannot inspect its part of the machine
    │   ├── WireError        the other side of a data port broke the protocol
    │   └── BackupRefused    an offer of a backup is refused
    ├── ClusterError         the local cluster cannot be started or is not up
    │   ├── TreeUnknown      the processes of the cluster are not known
    │   └── SoakStuck        the job of a soak does not reach its next gate
    ├── CannotInject         a fault is known and cannot be injected here
    │   └── NoCluster        the cluster of a drill does not start (a ClusterError too)
    ├── DumpError            a dump, record or table of timings cannot be read
    ├── LedgerError          the ledger cannot be opened or migrated
    ├── DamagedCode          an archive of code is not what its digest says
    ├── VersionStoreError    the store of versions does not answer, or lacks what is asked for
    └── NoticeError          a receiver did not accept a notice

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
    """A checkpoint's header, length or checksum is wrong."""


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


class CannotInspect(AgentError):
    """An inspection cannot inspect: a tool is missing, denied or silent. That is no fault of the machine."""


class WireError(AgentError):
    """The other side of a data port broke the protocol, or does not know the token."""


class BackupRefused(AgentError):
    """An offer of a backup is refused; a later offer may be accepted.

    ``newest`` is a step, not older than the offered one, that the peer has already; -1: there is another reason.
    """

    def __init__(self, reason: str, newest: int = -1) -> None:
        super().__init__(reason)
        self.newest = newest


class ClusterError(EverstepError):
    """The local cluster cannot be started or is not up."""


class TreeUnknown(ClusterError):
    """The supervisor is gone, so the processes of the cluster are not known."""


class SoakStuck(ClusterError):
    """The job of a soak does not reach its next gate; the message describes its state."""


class CannotInject(EverstepError):
    """A fault is known but cannot be injected here; the message says why."""


class NoCluster(CannotInject, ClusterError):
    """The cluster of a drill does not start; the message says why."""


class DumpError(EverstepError):
    """A dump, record or table for an analysis cannot be read."""


class LedgerError(EverstepError):
    """The ledger cannot be opened or migrated."""


class DamagedCode(EverstepError):
    """An archive of code does not match its digest."""


class VersionStoreError(EverstepError):
    """The store of versions does not answer, or lacks what is asked for; the message says which, and what to do."""


class NoticeError(EverstepError):
    """A receiver did not accept a notice; the message says why."""
