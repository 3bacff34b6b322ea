"""Delivers one notice to one receiver, once."""

from __future__ import annotations

import os
from collections.abc import Mapping

from activities.notices import program
from activities.notices.post import post
from activities.notices.settings import Receiver, secrets_of, url_of
from everstep.base.redaction import HIDDEN, masked
from everstep.errors import NoticeError
from everstep.model.notice import Notice


async def deliver(receiver: Receiver, notice: Notice, env: Mapping[str, str] = os.environ) -> str:
    """Deliver a notice; returns the receiver's answer, without secrets.

    Args:
        receiver: The receiver.
        notice: The notice.
        env: The environment variables that the receiver may name.

    Raises:
        NoticeError: the notice was not accepted; the message has no secrets.
    """
    try:
        if receiver.command:
            answer = await program.run(receiver.command, notice.body(), receiver.deadline_s)
        else:
            answer = await _post(receiver, notice, env)
    except NoticeError as error:
        raise NoticeError(_shown(str(error), receiver, env)) from None
    return _shown(answer, receiver, env)


async def _post(receiver: Receiver, notice: Notice, env: Mapping[str, str]) -> str:
    missing = [name for name in (receiver.url_from, *receiver.headers_from.values()) if name and not env.get(name)]
    if missing:
        raise NoticeError(f"the variable {missing[0]} is not set where this worker was started")
    return await post(
        url_of(receiver, env),
        notice.body(),
        id=notice.id,
        headers={header: env[name].strip() for header, name in receiver.headers_from.items()},
        ca_file=receiver.ca_file,
        deadline_s=receiver.deadline_s,
    )


def _shown(text: str, receiver: Receiver, env: Mapping[str, str]) -> str:
    """Return a text without the receiver's secrets: an answer may repeat them."""
    for secret in secrets_of(receiver, env):
        text = text.replace(secret, HIDDEN)
    return masked(text)
