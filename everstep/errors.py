"""The errors of everstep.

::

    EverstepError
    ├── ConfigError          a job file, an option or an environment variable is wrong
    ├── TopologyError        sizes that do not multiply, a rank that does not exist
    ├── CheckpointError      a checkpoint buffer cannot be written or read
    │   └── CorruptCheckpoint   its header, length or checksum does not hold
    ├── AgentError           a node agent refused a command or did not answer
    │   ├── AgentUnreachable
    │   ├── StillDying       ranks were killed and are not gone yet: ask again
    │   └── Fenced           the command belongs to a generation that was stopped
    ├── ClusterError         the local cluster cannot be started or is not up
    └── LedgerError          the ledger cannot be opened or migrated

A message says what was wrong, with which value, and what to do.
"""


class EverstepError(Exception):
    """Base of all errors that everstep raises on purpose."""


class ConfigError(EverstepError):
    """A job file, an option or an environment variable is wrong."""


class TopologyError(EverstepError):
    """Sizes do not multiply, or a rank or machine does not exist."""


class CheckpointError(EverstepError):
    """A checkpoint buffer cannot be written or read."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint's header, length or checksum does not hold."""


class AgentError(EverstepError):
    """A node agent refused a command."""


class AgentUnreachable(AgentError):
    """A node agent did not answer."""


class StillDying(AgentError):
    """Ranks were killed and are not gone yet, which can take minutes: ask again."""


class Fenced(AgentError):
    """The command belongs to a generation that was stopped."""


class ClusterError(EverstepError):
    """The local cluster cannot be started or is not up."""


class LedgerError(EverstepError):
    """The ledger cannot be opened or migrated."""
