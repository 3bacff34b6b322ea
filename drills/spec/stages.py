"""Where in a recovery a fault of the control plane strikes."""

from __future__ import annotations

from activities import messages

BEFORE_AN_UPDATE = {"make": messages.MAKE_VERSION, "try": messages.CHECK_VERSION}
"""What the job's workflow does with a version before an incident applies it → the activity that it consists of."""
STAGES = {
    **BEFORE_AN_UPDATE,
    "align": messages.ALIGN,
    "vote": messages.SLOW_ROUND,
    "trace": messages.TRACE,
    "stop": messages.STOP,
    "evict": messages.POOL_REPLACE,
    "prepare": messages.PREPARE,
    "await": messages.POOL_AWAIT,
    "decide": messages.DECIDE,
    "diagnose": messages.DIAGNOSE,
    "replay": messages.REPLAY_GROUP,
    "restore": messages.RESTORE,
    "reattempt": messages.LAUNCH,
    "rollback": messages.LAUNCH,
    "launch": messages.LAUNCH,
    "confirm": messages.CONFIRM,
}
"""Stage of an incident → the activity that it consists of; of the decision, the one that writes it down, and of a
rollback the launch of the code that it goes back to."""
REPORT = "report"
"""The stage before an incident; the update of the job's workflow has that name."""
MOMENTS = ("begin", "middle", "end")
"""Of a stage's activity."""
