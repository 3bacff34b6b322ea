"""The inspection of certificates warns before they expire, and never says that the machine is faulty."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent.monitor.host.certificates import CertificateInspection, CertificateLimits
from agent.monitor.inspection import InspectionResult, Site
from agent.security import DAY_S, validity
from everstep.errors import CannotInspect
from everstep.model.finding import Health, MachineFinding
from tests.everstep.decisions.act.evict.evict_facts import plan


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of a hundred days."""
    folder = tmp_path_factory.mktemp("certificate")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "100", "-subj", "/CN=m1"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "agent.crt")]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return folder / "agent.crt"


def inspected(*certificates: Path, now_s: float = 0.0) -> InspectionResult:
    site = Site(certificates=certificates, now_ns=lambda: int(now_s * 1e9))
    return CertificateInspection(site, CertificateLimits(), {}, same_boot=True).inspect()


@pytest.mark.parametrize(
    ("days_left", "told"),
    [(22.0, ""), (20.0, "expires in 20.0 days"), (-5.0, "expired 5.0 days ago"), (101.0, "valid")],
)
def test_a_certificate_is_reported_three_weeks_before_it_expires(
    certificate: Path, days_left: float, told: str
) -> None:
    _, ends = validity(certificate)
    found = inspected(certificate, now_s=ends - days_left * DAY_S)
    assert found.measures == {f'certificate_expires_timestamp_seconds{{file="{certificate}"}}': ends}
    assert [told in one.text for one in found.findings] == ([True] if told else [])
    assert {one.verdict for one in found.findings} <= {Health.UNKNOWN}
    seen = [MachineFinding(machine="m1", finding=one) for one in found.findings]
    assert plan(*seen).evict == []


def test_a_file_that_is_no_certificate_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "bad.crt").write_text("no PEM")
    for path in (tmp_path / "bad.crt", tmp_path / "missing.crt"):
        with pytest.raises(CannotInspect, match=path.name):
            inspected(path)


def test_an_agent_without_tls_has_nothing_to_inspect() -> None:
    assert inspected().note == "the agent uses no TLS"
