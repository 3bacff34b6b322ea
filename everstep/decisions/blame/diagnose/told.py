"""What a diagnosis says of each machine, for the rules of eviction."""

from __future__ import annotations

from everstep.decisions.blame.diagnose import reasons
from everstep.model.diagnosis import Diagnosis, as_tested
from everstep.model.health import Finding, MachineFinding


def told(found: Diagnosis, *, links: bool = True) -> list[MachineFinding]:
    """Every finding with its machine, faults first; with ``links`` those of links that do not work as well."""
    own = [(one.machine, finding) for one in found.machines for finding in one.findings]
    said = [
        MachineFinding(machine=machine, finding=as_tested(finding))
        for machine, finding in [*own, *(_of_links(found) if links else [])]
    ]
    return sorted(said, key=lambda one: one.finding.verdict != "faulty")


def _of_links(found: Diagnosis) -> list[tuple[str, Finding]]:
    """Machines without which all links that are left work.

    A link that does not work is of neither of its machines, and the job cannot run over it. Who has most of them has
    the finding, of two alike the later one, which is not where the rendezvous store is.
    """
    left, said = list(found.links), []
    order = list(
        dict.fromkeys([*(one.machine for one in found.machines), *(one for link in left for one in link.machines)])
    )
    while left:
        machine = max(order, key=lambda one: (sum(one in link.machines for link in left), order.index(one)))
        for link in [link for link in left if machine in link.machines]:
            other = next(one for one in link.machines if one != machine)
            text = f"the link between it and {other} does not work, and both work with others"
            said.append((machine, reasons.BAD_LINK.found(link.test, other, link.text, text=text)))
            left.remove(link)
    return said
