"""Checks a drill's request before anything is started."""

from __future__ import annotations

from drills.clusters import network
from drills.spec.request import DrillRequest
from everstep.errors import CannotInject, ConfigError
from everstep.model.topology import SHORT_ORDER


def check(request: DrillRequest) -> None:
    """Refuse a request that makes no sense, or whose fault cannot be injected on this computer.

    Raises:
        ConfigError: the request makes no sense.
        CannotInject: the fault cannot be injected here.
    """
    check_sense(request)
    opening = request.opening
    why = network.missing(with_postgres=opening.needs_postgres) if opening.needs_network else ""
    if why := why or opening.why_not():
        raise CannotInject(f"{opening.name}: {why}")


def check_sense(request: DrillRequest) -> None:
    """Refuse a request that makes no sense on any computer.

    Raises:
        ConfigError: the request makes no sense.
    """
    if not request.script and request.config is None:
        _check_steps(request)
    spec = request.spec("drill", {})
    if request.mesh and not (request.script or request.config or set(spec.topology().axes) == set(SHORT_ORDER)):
        raise ConfigError(
            "--mesh needs a script of yours, after `--`: the example GPT always has the axes pp, dp and tp"
        )
    request.opening.refuse(request, spec)
    request.fault.refuse(request, spec)


def _check_steps(request: DrillRequest) -> None:
    total, last = request.total_steps, max(request.at_step, request.strike_hold or 0)
    if request.opening.is_update and request.hold_step >= total:
        raise ConfigError(
            f"--at-step {request.at_step}: a job of --steps {total} ends before its update was tried: use more than "
            f"--steps {request.hold_step}, the step at which the job waits for that"
        )
    if last >= total:
        second = f" (its second fault comes at step {last})" if last > request.at_step else ""
        raise ConfigError(
            f"--at-step {request.at_step}{second} is not reached by a job of --steps {total}: "
            f"its steps are 0 to {total - 1}"
        )
    if request.at_step + (needed := request.opening.steps_needed) >= total:
        raise ConfigError(f"--at-step {request.at_step}: the job needs {needed} more steps after it")
