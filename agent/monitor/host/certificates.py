"""This module inspects the certificates with which the agent and its callers accept each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from agent.security import DAY_S, problem_of, validity
from everstep.errors import CannotInspect, ConfigError
from everstep.model.finding import Health, Owner, Reason, Remedy

EXPIRES = Reason(
    "certificate-expires",
    "a certificate of the agent expires soon or has expired: the machine works, but it will not be reached",
    Owner.UNKNOWN,
    Remedy.CHECK_SETUP,
    Health.UNKNOWN,
)


class CertificateLimits(Limits):
    """Thresholds for certificates."""

    interval_s: float = Field(default=60.0, gt=0)
    """Period, seconds."""
    soon_days: float = Field(default=21.0, ge=0)
    """A certificate that expires within this time is reported, days."""


class CertificateInspection(Inspection):
    """Inspects when the agent's certificates expire. An expired certificate is no fault of the machine."""

    name: ClassVar[str] = "certificates"
    inspects: ClassVar[str] = "the agent's certificates: when they expire"
    reasons: ClassVar[tuple[Reason, ...]] = (EXPIRES,)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("certificate_expires_timestamp_seconds", "file", "end of a certificate's validity, seconds since 1970")
    )
    limits_type: ClassVar[type[Limits]] = CertificateLimits

    def inspect(self) -> InspectionResult:
        """Read all certificates."""
        now = self.site.now_ns() / 1e9
        result = InspectionResult(note="" if self.site.certificates else "the agent uses no TLS")
        for path in self.site.certificates:
            try:
                problem, (_, ends) = problem_of(path, now), validity(path)
            except ConfigError as error:
                raise CannotInspect(str(error)) from error
            result.measures[f'certificate_expires_timestamp_seconds{{file="{path}"}}'] = ends
            if not problem and ends - now < self.limits.soon_days * DAY_S:
                problem = f"the certificate {path} expires in {(ends - now) / DAY_S:.1f} days: issue another one"
            if problem:
                result.findings.append(self.finding(EXPIRES, str(path), text=problem))
        return result
