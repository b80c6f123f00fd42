"""A call of another release is refused with both versions named, and goes on at another worker."""

from __future__ import annotations

import pytest

from backends.errors import WorkerGone, from_wire
from backends.workers.protocol import CALLS_VERSION, check_version


def test_this_version_is_taken() -> None:
    check_version(CALLS_VERSION)


@pytest.mark.parametrize("given", [None, CALLS_VERSION + 1, CALLS_VERSION - 1, "1", 2**40])
def test_any_other_is_refused_as_a_worker_that_is_not_there(given: object) -> None:
    with pytest.raises(WorkerGone) as refusal:
        check_version(given)
    version = given if isinstance(given, int) else 0
    assert f"version {version} " in str(refusal.value)
    assert f"worker uses {CALLS_VERSION};" in str(refusal.value)
    assert isinstance(from_wire(refusal.value.wire_message(), "decode_0"), WorkerGone)
