"""Defines the errors of everstep.

A message says what is wrong, with which value, and what to do. ``agent/statuses.py`` maps errors to the gRPC statuses
by which an agent reports them.
"""


class EverstepError(Exception):
    """Base of all errors that everstep raises on purpose."""


class ConfigError(EverstepError):
    """A job file, an option or an environment variable is wrong."""


class NoSuchFolder(ConfigError):
    """The folder of a job's code does not exist on this machine."""


class NoSuchJob(ConfigError):
    """Temporal has no workflow of that id: no job of that name runs or ever ran."""


class TopologyError(EverstepError):
    """Sizes do not multiply to the number of ranks, or a rank or machine does not exist."""


class CheckpointError(EverstepError):
    """A checkpoint buffer cannot be written or read."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint's header, length or checksum is wrong."""


class CopyInterrupted(CheckpointError):
    """The transfer of a checkpoint was given up, since its job, its generation or the agent ends."""


class AgentError(EverstepError):
    """A node agent refused a command."""


class AgentUnreachable(AgentError):
    """A node agent did not answer."""


class AgentRefuses(AgentUnreachable):
    """A node agent is there, but it and this process do not accept each other: a token or a certificate of one of them
    is wrong, or one of them is of another release. That is no fault of the machine."""


class UnknownJob(AgentError):
    """The job was not prepared on this machine, or the requested object does not exist there."""


class CodeMissing(AgentError):
    """The snapshot of code is not on this machine: send it there, then repeat the command."""


class StillDying(AgentError):
    """Ranks were killed and are not gone yet, which can take minutes: repeat the command."""


class Fenced(AgentError):
    """The command belongs to a generation that was stopped."""


class ForkServerLost(AgentError):
    """The fork server died while it was needed."""


class CannotInspect(AgentError):
    """An inspection cannot inspect its part of the machine: a tool is missing, is not permitted or does not answer.

    This is not a fault of the machine.
    """


class Lacks(CannotInspect):
    """An agent lacks something that it needs of its machine or container, e.g. a right.

    ``problem`` says what was found, and ``remedy`` what to do.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


class WireError(AgentError):
    """The other side of a data port broke the protocol, or does not know the token."""


class BackupRefused(AgentError):
    """A peer refuses the backup that it was offered; it may accept a later one.

    ``newest`` is the step of a backup that the peer already has and that is at least as new as the offered one; -1: the
    offer is refused for another reason.
    """

    def __init__(self, reason: str, newest: int = -1) -> None:
        super().__init__(reason)
        self.newest = newest


class ClusterError(EverstepError):
    """The local cluster cannot be started or is not up."""


class TreeUnknown(ClusterError):
    """The supervisor of the local cluster is gone, so the processes of the cluster are not known."""


class SoakStuck(ClusterError):
    """The job of a soak does not reach its next gate; the message describes its state."""


class CannotInject(EverstepError):
    """A fault is known but cannot be injected here; the message says why."""


class NoCluster(CannotInject, ClusterError):
    """The local cluster of a drill does not start; the message says why."""


class DumpError(EverstepError):
    """A dump, flight record or table of timings cannot be read."""


class LedgerError(EverstepError):
    """The ledger cannot be opened or migrated."""


class DamagedCode(EverstepError):
    """An archive of code does not match its digest."""


class VersionStoreError(EverstepError):
    """The store of versions does not answer, or lacks the requested version; the message says what to do."""


class NoticeError(EverstepError):
    """A receiver did not accept a notice; the message says why."""
