"""everstep keeps large training jobs stepping.

A training script needs four calls::

    import everstep

    run = everstep.join(tp=2, pp=2)
    state = run.checkpoint(model=model, optimizer=optimizer, data=sampler)
    for step in run.steps(total, state):
        ...
        run.report(step, loss=loss, grad_norm=norm, tokens=n)

Importing this package takes milliseconds. The names below import torch when
they need it, and never pydantic, grpc or temporalio.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Checkpoint", "Run", "Topology", "join"]

if TYPE_CHECKING:
    from everstep.model.topology import Topology
    from everstep.training.checkpoint import Checkpoint
    from everstep.training.join import join
    from everstep.training.run import Run

_MODULES = {
    "Checkpoint": "everstep.training.checkpoint",
    "Run": "everstep.training.run",
    "Topology": "everstep.model.topology",
    "join": "everstep.training.join",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
