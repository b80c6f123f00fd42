"""What the tests of keys share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mooncake_store.keys.hosts import Hosts


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path / "keys", monkeypatch)
