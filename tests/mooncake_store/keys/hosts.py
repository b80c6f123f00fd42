"""Two clusters' keys in a folder, and this process as one of their hosts, or as a stranger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncake_store.keys.authority import Authority
from mooncake_store.keys.curve import INSECURE_VARIABLE
from mooncake_store.keys.folder import VARIABLE, Keys

BeAt = Callable[..., None]


class Hosts:
    """`ours` has hosts a, b and c; `other` is another cluster with a host a."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours, self.other = folder / "ours", folder / "other"
        self._monkeypatch = monkeypatch
        monkeypatch.delenv(INSECURE_VARIABLE, raising=False)
        self.authority = Authority.begun(self.ours)
        for host in ("a", "b", "c"):
            self.authority.add_host(host)
        Authority.begun(self.other).add_host("a")

    def be(self, host: str) -> None:
        """From here on this process is that host; "" for one without keys."""
        if not host:
            self._monkeypatch.delenv(VARIABLE, raising=False)
            return
        place = self.other / "a" if host == "stranger" else self.ours / host
        self._monkeypatch.setenv(VARIABLE, str(place))

    @contextmanager
    def being(self, host: str, afterwards: str) -> Iterator[None]:
        self.be(host)
        try:
            yield
        finally:
            self.be(afterwards)

    def keys(self, host: str) -> Keys:
        return Keys(self.ours / host)
