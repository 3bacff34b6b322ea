"""What a diagnosis says of each machine, for the rules of eviction."""

from __future__ import annotations

from everstep.decisions.diagnose import reasons
from everstep.model.diagnosis import Diagnosis, as_tested
from everstep.model.health import MachineFinding


def told(found: Diagnosis, *, links: bool = True) -> list[MachineFinding]:
    """Every finding with its machine, faults first; with ``links`` those of links that do not work as well.

    A link that does not work is of neither of its machines, and the job cannot run over it: the later of the two, which
    is not where the rendezvous store is, has the finding (ours).
    """
    own = [(one.machine, finding) for one in found.machines for finding in one.findings]
    order = [one.machine for one in found.machines]
    for link in found.links if links else ():
        one, other = sorted(link.machines, key=order.index)
        text = f"no data passes between it and {one}, and both work with others"
        own.append((other, reasons.BAD_LINK.found(link.test, one, link.text, text=text)))
    said = [MachineFinding(machine=machine, finding=as_tested(finding)) for machine, finding in own]
    return sorted(said, key=lambda one: one.finding.verdict != "faulty")
