"""``everstep notices``: test the receivers of notices about events."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from pathlib import Path
from typing import Annotated

import typer

from everstep.rank import environment

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _about() -> None:
    """Test the receivers of notices about events: parked jobs, evicted machines, failed jobs.

    Workers get the file of receivers by `everstep worker --notices FILE` or EVERSTEP_NOTICES; workers of a local
    cluster get it by `everstep up --notices FILE`. docs/guides/notices.md describes the file.
    """


@app.command("test")
def test(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file with the receivers.")],
    only: Annotated[str, typer.Option("--only", metavar="NAME", help="Test only this receiver. Default: all.")] = "",
) -> None:
    """Send one test notice to all receivers in a file, and show their answers.

    The notice is sent once, and by this process: the variables that the file names must be set here.

    Examples:

        everstep notices test notices.toml

        everstep notices test notices.toml --only pager

    Exit codes: 0 all receivers accepted the notice; 1 a receiver did not; 2 the file is wrong.
    """
    from activities.notices.deliver import deliver
    from activities.notices.settings import Receiver
    from controlplane.settings_files import notice_settings
    from controlplane.shown import clean_line
    from everstep.errors import ConfigError, NoticeError
    from everstep.model.notice import Notice, NoticeKind

    receivers = [receiver for receiver in notice_settings(file).receiver if only in ("", receiver.name)]
    if not receivers:
        raise ConfigError(f"{file} has no receiver {only!r}: 'everstep notices test {file}' tests all its receivers")
    notice = Notice(
        kind=NoticeKind.TEST,
        id=f"test/{uuid.uuid4().hex}",
        text="this is a test of everstep's notices: no action is needed",
        time_ns=time.time_ns(),
        cluster=os.environ.get(environment.TASK_QUEUE, ""),
    )

    async def send(receiver: Receiver) -> bool:
        try:
            answer, accepted = await deliver(receiver, notice), True
        except NoticeError as error:
            answer, accepted = str(error), False
        print(f"{receiver.name}: {'accepted' if accepted else 'not accepted'}: {clean_line(answer)}", flush=True)
        return accepted

    async def send_all() -> bool:
        return all(await asyncio.gather(*map(send, receivers)))

    if not asyncio.run(send_all()):
        raise typer.Exit(1)
