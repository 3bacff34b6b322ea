"""Makes a certificate authority and certificates for the agents of a test cluster, with openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import ClusterError
from everstep.system import private_files as private

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
DAYS = "30"
"""Number of days for which the certificates are valid."""


@dataclass(frozen=True)
class Certificates:
    """The certificates of one cluster: the files ``ca.crt``, and ``NAME.crt`` and ``NAME.key`` for each machine."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate of the authority that signed all others."""
        return self.folder / "ca.crt"

    def options(self, machine: str) -> list[str]:
        """TLS options for the agent of a machine."""
        return ["--tls-cert", str(self.folder / f"{machine}.crt"), "--tls-key", str(self.folder / f"{machine}.key")]

    def make(self, addresses: dict[str, str]) -> None:
        """Make the authority and all certificates.

        Args:
            addresses: Machine → the address on which its agent listens.

        Raises:
            ClusterError: openssl is missing or failed.
        """
        private.make_folder(self.folder)
        self._openssl("req", "-x509", *KEY, "-days", DAYS, "-subj", "/CN=everstep agents", *_out("ca.key", "ca.crt"))
        for machine, address in addresses.items():
            (self.folder / "names").write_text(f"subjectAltName=IP:{address}\nextendedKeyUsage=serverAuth,clientAuth\n")
            self._openssl("req", *KEY, "-subj", f"/CN={machine}", *_out(f"{machine}.key", "request"))
            signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS, "-extfile", "names")
            self._openssl("x509", "-req", "-in", "request", *signed, "-out", f"{machine}.crt")

    def _openssl(self, *words: str) -> None:
        try:
            done = subprocess.run(
                ["openssl", *words], cwd=self.folder, capture_output=True, text=True, check=False, umask=0o077
            )
        except OSError as error:
            raise ClusterError(f"openssl cannot be run: {error.strerror}; install it") from error
        if done.returncode:
            raise ClusterError(f"'openssl {' '.join(words)}' failed: {done.stderr.strip()}")


def _out(key: str, certificate: str) -> tuple[str, ...]:
    return "-keyout", key, "-out", certificate
