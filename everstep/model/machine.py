"""Machines as the control plane knows them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Machine(BaseModel):
    """One machine and where its agent listens."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    address: str
    """``host:port`` of the agent's gRPC server."""
    domain: str = ""
    """Failure domain, e.g. its switch or rack; empty: not known."""

    @property
    def host(self) -> str:
        """The host part of the address."""
        return self.address.rsplit(":", 1)[0]
