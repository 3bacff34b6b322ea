"""``everstep notices``: the receivers of notices about events."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from pathlib import Path
from typing import Annotated

import typer

from everstep.rank import environment

EXIT_NOT_TAKEN = 1

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _about() -> None:
    """Who is told of events: parked jobs, evicted machines, jobs that failed.

    Workers have the file with `everstep worker --notices FILE`, or EVERSTEP_NOTICES; those of a local cluster
    with `everstep up --notices FILE`. docs/guides/notices.md says what is in it.
    """


@app.command("test")
def test(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file with the receivers.")],
    only: Annotated[str, typer.Option("--only", metavar="NAME", help="One receiver of it. Default: all.")] = "",
) -> None:
    """Send one test notice to all receivers of a file, and say what came back.

    It is sent once, by this process: variables that the file names must be set here.

    Examples:

        everstep notices test notices.toml

        everstep notices test notices.toml --only pager

    Exit codes: 0 all took it; 1 one did not; 2 the file is wrong.
    """
    from activities.notices.deliver import deliver
    from activities.notices.settings import Receiver
    from controlplane.notices_file import notice_settings
    from controlplane.shown import clean_line
    from everstep.errors import ConfigError, NoticeError
    from everstep.model.notice import Notice, NoticeKind

    receivers = [one for one in notice_settings(file).receiver if only in ("", one.name)]
    if not receivers:
        raise ConfigError(f"{file} has no receiver {only!r}: 'everstep notices test {file}' tries all of it")
    notice = Notice(
        kind=NoticeKind.TEST,
        id=f"test/{uuid.uuid4().hex}",
        text="this is a test of everstep's notices: nothing is to be done",
        time_ns=time.time_ns(),
        cluster=os.environ.get(environment.TASK_QUEUE, ""),
    )

    async def send(receiver: Receiver) -> bool:
        try:
            said, taken = await deliver(receiver, notice), True
        except NoticeError as error:
            said, taken = str(error), False
        print(f"{receiver.name}: {'taken' if taken else 'not taken'}: {clean_line(said)}", flush=True)
        return taken

    async def send_all() -> bool:
        return all(await asyncio.gather(*map(send, receivers)))

    if not asyncio.run(send_all()):
        raise typer.Exit(EXIT_NOT_TAKEN)
