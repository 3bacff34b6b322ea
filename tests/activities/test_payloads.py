"""Large inputs and results are compressed on their way through Temporal, and small ones are not."""

from __future__ import annotations

from activities.payloads import COMPRESSED_FROM, DATA_CONVERTER, ENCODING
from everstep.model.evidence import Evidence


async def test_small_payloads_stay_readable() -> None:
    [payload] = await DATA_CONVERTER.encode([Evidence(generation=3)])
    assert b'"generation":3' in payload.data


async def test_large_payloads_are_decoded_without_change() -> None:
    evidence = Evidence(generation=3, problem="x" * COMPRESSED_FROM)
    [payload] = await DATA_CONVERTER.encode([evidence])
    assert payload.metadata["encoding"] == ENCODING
    assert len(payload.data) < 10_000
    assert await DATA_CONVERTER.decode([payload], [Evidence]) == [evidence]
