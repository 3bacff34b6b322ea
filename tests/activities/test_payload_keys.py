"""Encrypted payloads: complete, unreadable without the key, and readable after a new key was added."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.common.v1 import Payload
from temporalio.converter import DataConverter

from activities.payload_keys import ENCODING as ENCRYPTED
from activities.payload_keys import Keys
from activities.payloads import COMPRESSED_FROM, DATA_CONVERTER, Codec, data_converter
from everstep.errors import ConfigError
from everstep.model.evidence import Evidence
from everstep.rank.environment import PAYLOAD_KEY_FILE

OLD, NEW = bytes(range(32)), bytes(32)
FIRST = Keys({"k1": OLD})
BOTH = Keys({"k2": NEW, "k1": OLD})


def with_keys(keys: Keys) -> DataConverter:
    return dataclasses.replace(DATA_CONVERTER, payload_codec=Codec(keys))


@given(st.binary(max_size=2000), st.dictionaries(st.text(max_size=20), st.binary(max_size=50), max_size=3))
def test_every_payload_comes_back_with_its_metadata(data: bytes, metadata: dict[str, bytes]) -> None:
    payload = Payload(data=data, metadata=metadata)
    sent = FIRST.encrypted(payload)
    assert FIRST.decrypted(sent) == payload
    assert len(data) < 4 or data not in sent.data
    assert FIRST.encrypted(payload).data != sent.data, "the same payload is encrypted with a new nonce each time"


@pytest.mark.parametrize("size", [10, COMPRESSED_FROM])
async def test_small_and_large_ones_are_encrypted(size: int) -> None:
    evidence = Evidence(generation=3, problem="secret" * size)
    [payload] = await with_keys(FIRST).encode([evidence])
    assert payload.metadata["encoding"] == ENCRYPTED
    assert b"secret" not in payload.SerializeToString()
    assert len(payload.data) < 20_000, "a large payload is compressed before it is encrypted"
    assert await with_keys(FIRST).decode([payload], [Evidence]) == [evidence]


async def test_a_new_key_encrypts_and_the_old_one_still_reads() -> None:
    [old] = await with_keys(FIRST).encode([Evidence(generation=1)])
    [new] = await with_keys(BOTH).encode([Evidence(generation=2)])
    [clear] = await DATA_CONVERTER.encode([Evidence(generation=3)])
    found = await with_keys(BOTH).decode([old, new, clear], [Evidence] * 3)
    assert [one.generation for one in found] == [1, 2, 3]
    with pytest.raises(ConfigError, match=f"with key 'k2', which is not in the key file of {PAYLOAD_KEY_FILE}"):
        await with_keys(FIRST).decode([new], [Evidence])


async def test_who_has_no_key_is_told_so() -> None:
    [payload] = await with_keys(FIRST).encode([Evidence(generation=1)])
    with pytest.raises(ConfigError, match=f"encrypted with key 'k1': set {PAYLOAD_KEY_FILE} to the file that has it"):
        await DATA_CONVERTER.decode([payload], [Evidence])


@given(st.data())
def test_what_was_changed_is_refused(data: st.DataObject) -> None:
    sent = FIRST.encrypted(Payload(data=b"launch nothing"))
    at = data.draw(st.integers(0, len(sent.data) - 1))
    changed = bytearray(sent.data)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ConfigError, match="was changed"):
        FIRST.decrypted(Payload(metadata=sent.metadata, data=bytes(changed)))
    with pytest.raises(ConfigError, match="was changed, or that id names another key"):
        Keys({"k1": NEW}).decrypted(sent)


async def test_the_key_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\nk2 {NEW.hex()}\nk1 {OLD.hex()}\n")
    monkeypatch.setenv(PAYLOAD_KEY_FILE, str(path))
    [payload] = await data_converter().encode([Evidence(generation=2)])
    assert await with_keys(BOTH).decode([payload], [Evidence]) == [Evidence(generation=2)]
    assert payload.metadata["encryption-key-id"] == b"k2"
    monkeypatch.delenv(PAYLOAD_KEY_FILE)
    assert data_converter() is DATA_CONVERTER


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"k1 {OLD.hex()}\nk1 {NEW.hex()}\n", "line 2 "),
        (f"{OLD.hex()}\n", "line 1 "),
        ("k1 1234\n", "line 1 "),
        ("k1 nonsense\n", "line 1 "),
        ("# nothing\n", "has no key"),
    ],
)
def test_a_wrong_key_file_is_named_and_not_shown(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        Keys.load(path)
    assert str(path) in str(caught.value)
    assert OLD.hex() not in str(caught.value) and NEW.hex() not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.load(tmp_path / "nonsuch")
