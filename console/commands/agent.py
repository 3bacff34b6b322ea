"""``everstep agent``: run the agent of one machine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from console.commands.shared import port_range
from everstep.base.addresses import ANY_PORT, Ports


def agent(  # noqa: PLR0917
    machine: Annotated[str, typer.Option(help="Name of this machine, unique in the cluster.")],
    listen: Annotated[
        str,
        typer.Option(
            help="host:port to listen on, or host:FIRST-LAST; the rendezvous stores of jobs use this host too."
        ),
    ],
    state_dir: Annotated[Path, typer.Option(help="Folder for observations, job records, step records and logs.")],
    shm_dir: Annotated[
        Path, typer.Option(help="Folder in /dev/shm for reports and checkpoints of this machine alone.")
    ],
    data_cards: Annotated[
        str,
        typer.Option(
            envvar="EVERSTEP_DATA_CARDS",
            metavar="CARD,CARD",
            help="Network cards for backups, interfaces or addresses: one for each GPU, or fewer. Default: the card "
            "with the address of --listen, if there is no other card.",
        ),
    ] = "",
    data_port: Annotated[
        Ports | None,
        typer.Option(
            envvar="EVERSTEP_DATA_PORT",
            parser=port_range,
            metavar="PORT",
            help="Port for state between machines, or FIRST-LAST for the first free one. Default: any free port.",
        ),
    ] = None,
    prewarm: Annotated[bool, typer.Option("--prewarm", help="Start a fork server before the first job.")] = False,
    template: Annotated[
        Path | None,
        typer.Option(
            envvar="EVERSTEP_TEMPLATE", help="Socket of the template that forks fork servers; 'everstep up' sets it."
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM); turns TLS on.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Require that callers have certificates of this authority (PEM).")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="EVERSTEP_AGENT_TOKEN_FILE", help="File with the token that every call must carry."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve every user of this machine without a token; on loopback only.")
    ] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(envvar="EVERSTEP_AGENT_CA_FILE", help="Authority (PEM) of the other agents' certificates."),
    ] = None,
    monitor: Annotated[
        Path | None,
        typer.Option(
            envvar="EVERSTEP_MONITOR", help="TOML file with inspection settings: docs/concepts/inspections.md."
        ),
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Serve /metrics for Prometheus on host:port: docs/reference/metrics.md.")
    ] = "",
    log_mib: Annotated[int, typer.Option(help="Rotate a rank's log beyond this size, MiB.", min=1)] = 64,
    log_backups: Annotated[int, typer.Option(help="Number of rotated logs to keep.", min=1)] = 3,
    log_format: Annotated[
        str, typer.Option(envvar="EVERSTEP_LOG_FORMAT", help="Format of the log: text or json. Default: text.")
    ] = "",
) -> None:
    """Run the agent of one machine, in the foreground, until SIGTERM.

    When the agent ends or is killed, the ranks that it started continue; the next agent with the same --state-dir
    adopts them. Every call must carry the token in --token-file; workers and commands read it from the file that
    EVERSTEP_AGENT_TOKEN_FILE names. On addresses other than loopback, TLS is required as well. No other user may have
    access to --state-dir or --shm-dir: docs/guides/security.md.

    Example:

        (umask 077; openssl rand -hex 32 > ~/everstep-token)

        everstep agent --machine m1 --listen 127.0.0.1:7070 --token-file ~/everstep-token --state-dir
        /var/lib/everstep --shm-dir /dev/shm/m1
    """
    from agent.main import AgentOptions, serve
    from agent.security import ServerSecurity
    from controlplane.logging_setup import configure
    from controlplane.settings_files import monitor_settings

    configure("agent", json=log_format == "json" if log_format else None)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    security = ServerSecurity(
        tls_cert=tls_cert, tls_key=tls_key, token_file=token_file, tls_client_ca=tls_client_ca, insecure=insecure
    )
    options = AgentOptions(
        machine=machine,
        listen=listen,
        state_dir=state_dir.absolute(),
        shm_dir=shm_dir.absolute(),
        data_cards=tuple(filter(None, (card.strip() for card in data_cards.split(",")))),
        data_ports=data_port or ANY_PORT,
        prewarm=prewarm,
        template=template,
        security=security,
        peers=security.as_client(ca_file),
        monitor=monitor_settings(monitor),
        metrics=metrics,
        log_bytes=log_mib << 20,
        log_backups=log_backups,
    )
    asyncio.run(serve(options))
