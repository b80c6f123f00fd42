"""The wire: one request per verb, bounds refused by name, other versions refused by number."""

from __future__ import annotations

import inspect
from functools import reduce
from operator import or_
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store import errors
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.records import events
from mooncake_store.records.blocks import Copy
from mooncake_store.wire import directory_protocol as protocol
from mooncake_store.wire.framing import (
    PROTOCOL_VERSION,
    MessageKind,
    number_of,
    pack_header,
    unpack_header,
)
from tests.mooncake_store.makers import chain, node_info, report, worker_info

REQUESTS = protocol.VERBS
DECODER = msgspec.msgpack.Decoder(reduce(or_, REQUESTS))


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda each: each.__name__)
def test_each_request_is_a_verb_of_the_directory_and_of_its_client(request_type: type) -> None:
    verb = str(request_type.__struct_config__.tag)  # type: ignore[attr-defined]
    fields = list(request_type.__struct_fields__)  # type: ignore[attr-defined]
    parameters = list(inspect.signature(getattr(Directory, verb)).parameters)
    assert sorted([*fields, "self", "now_s"]) == sorted(parameters)
    method = getattr(DirectoryClient, verb)
    if (sent := inspect.getclosurevars(method).nonlocals.get("request")) is not None:
        assert sent is request_type
    else:
        assert ["self", *fields] == list(inspect.signature(method).parameters)


def test_each_verb_of_the_directory_can_be_requested() -> None:
    timed = {
        name
        for name, verb in inspect.getmembers(Directory, inspect.isfunction)
        if "now_s" in inspect.signature(verb).parameters and not name.startswith("_")
    }
    assert timed - {each.__struct_config__.tag for each in REQUESTS} == {"tick"}


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"type": "renew", "owner": "r", "lease_s": -1.0}, "lease_s"),
        ({"type": "renew", "owner": "r", "lease_s": float("nan")}, "lease_s"),
        ({"type": "renew", "owner": "r", "lease_s": float("inf")}, "lease_s"),
        ({"type": "renew", "owner": "", "lease_s": 1.0}, "owner"),
        ({"type": "renew", "owner": "r" * 257, "lease_s": 1.0}, "owner"),
        ({"type": "renew", "owner": "r", "lease_s": 1.0, "more": 1}, "more"),
        ({"type": "release"}, "owner"),
        ({"type": "drop_copy", "key": b"short", "node_id": "s", "generation": 1}, "key"),
        ({"type": "attach", "node_id": "s", "fingerprint": "f", "block_bytes": 0}, "block_bytes"),
        ({"type": "abandon", "slots": [["s0", 1]], "owner": "r"}, "slots"),
        ({"type": "frobnicate"}, "frobnicate"),
    ],
)
def test_what_breaks_a_bound_is_refused_by_name(
    request_fields: dict[str, object], field: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        DECODER.decode(msgspec.msgpack.encode(request_fields))


def test_too_many_keys_at_once_are_refused() -> None:
    keys = chain(1) * (protocol.KEYS_MAX + 1)
    request = protocol.Lookup(keys, "r", 0.0, True)
    with pytest.raises(msgspec.ValidationError, match=str(protocol.KEYS_MAX)):
        DECODER.decode(msgspec.msgpack.encode(request))


@given(kind=st.sampled_from(list(MessageKind)), number=st.integers(0, 2**64 - 1))
def test_a_header_says_what_it_was_made_of(kind: MessageKind, number: int) -> None:
    frame = pack_header(kind, number)
    assert unpack_header(frame) == (kind, number)
    assert number_of(frame) == number


@given(st.binary(max_size=40))
def test_other_bytes_are_no_header(frame: bytes) -> None:
    with pytest.raises((errors.RequestInvalid, errors.ProtocolMismatch)):
        unpack_header(frame)


def test_another_version_is_refused_with_both_numbers() -> None:
    frame = pack_header(MessageKind.REQUEST, 5, version=9)
    both = rf"version 9 .* this side {PROTOCOL_VERSION}"
    with pytest.raises(errors.ProtocolMismatch, match=both):
        unpack_header(frame)
    assert number_of(frame) == 5, "the refusal must reach the request that it is for"


def test_every_event_arrives_as_it_was_sent() -> None:
    key = chain(1)[0]
    sent: list[events.Event] = [
        events.BlockAdded(key, "s0"),
        events.BlockAdded(key, "s0", Copy("s0", 3, 2**61, 2**63 + 1, 4096)),
        events.BlockRemoved(key, "s1"),
        events.NodeUp(node_info()),
        events.NodeDown("s0", "n1"),
        events.WorkerUp(worker_info()),
        events.WorkerDown("prefill_0", "w1"),
        events.WorkerReported(report()),
        events.FrontendNoted("f1", 7, b"notes"),
    ]
    assert {type(event) for event in sent} == set(get_args(events.Event))
    raw = msgspec.msgpack.encode(protocol.Events(3, 10, protocol.to_messages(sent)))
    batch = msgspec.msgpack.Decoder(protocol.Events).decode(raw)
    assert (batch.epoch, batch.first_sequence) == (3, 10)
    assert protocol.from_messages(batch.events) == sent


def test_every_error_travels_by_name() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.StoreError):
            error = errors.named(name, "why")
            assert type(error) is kind and str(error) == "why"
            assert kind.__doc__, f"{name} does not say what happened and what to do then"
    assert str(errors.named("FromTheFuture", "why")) == "FromTheFuture: why"
