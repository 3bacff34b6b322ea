"""No payload converter may depend on a context, because the workflow runner computes the context only once."""

from __future__ import annotations

import pytest
from temporalio.converter import CompositePayloadConverter, WithSerializationContext

from activities.payload_keys import Keys
from activities.payloads import DATA_CONVERTER, Codec


def parts() -> list[object]:
    """Return everything that converts payloads or failures."""
    whole = DATA_CONVERTER.payload_converter_class()
    inner = list(whole.converters.values()) if isinstance(whole, CompositePayloadConverter) else [whole]
    return [*inner, DATA_CONVERTER.failure_converter, DATA_CONVERTER.payload_codec, Codec(Keys({"k1": bytes(32)}))]


@pytest.mark.parametrize("part", parts(), ids=lambda part: type(part).__name__)
def test_no_converter_of_ours_depends_on_a_context(part: object) -> None:
    """A composite converter passes a context on to its parts, but no part of ours uses a context."""
    assert not isinstance(part, WithSerializationContext)


def test_nothing_of_ours_is_stored_outside() -> None:
    assert DATA_CONVERTER.external_storage is None
