"""A host's folder of keys: its files, and live access to them by a process.

    zeromq.json  CURVE keys of the directory and of this host, and the public keys of all hosts
    host.pem     the certificate of this host, for gRPC and for KV over TCP;   host.key  its key
    ca.pem       the trusted certificate authorities: one, or two during a renewal
    secret       shared secret that authenticates calls and messages of the cluster's processes

`zeromq.json`, `host.key` and `secret` are private: only their owner and group may read them, and
only their owner may write them. A folder with other permissions is rejected. `MOONCAKE_KEYS` names
the folder; the environment never contains keys.

CURVE keys and TLS files are read again when they change, so that keys can be renewed in a running
process. While a folder is being copied, files may be unusable. The process then keeps the keys that
it has. `secret` is read at each access.

Not here: making keys (authority.py), CURVE on sockets (curve.py), TLS contexts (tls.py).
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from mooncake_store.errors import StoreError

VARIABLE = "MOONCAKE_KEYS"
ZEROMQ, CERTIFICATE, PRIVATE_KEY = "zeromq.json", "host.pem", "host.key"
AUTHORITIES, SECRET = "ca.pem", "secret"
# Every certificate of a cluster has this name, and clients check it. The name shows that a host is
# in the cluster, but not which one. So addresses may change, and autoscaled hosts share a folder.
MEMBER = "member.mooncake"
FILES = (ZEROMQ, CERTIFICATE, PRIVATE_KEY, AUTHORITIES, SECRET)
PRIVATE_FILES = (ZEROMQ, PRIVATE_KEY, SECRET)

log = logging.getLogger(__name__)
T = TypeVar("T")


class KeysInvalid(StoreError):
    """The folder of keys cannot be used. The message names the folder or the file."""


class CurveGeneration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CURVE keys of one host that were made together. During a renewal two generations are valid.
    Each key is 40 characters of Z85."""

    number: int
    directory_public: str
    own_public: str
    own_secret: str
    hosts: dict[str, str]  # host -> public key; all hosts of the cluster
    directory_secret: str = ""  # "" if no directory may run on this host

    def __repr__(self) -> str:  # without secrets, for logs
        return f"CurveGeneration({self.number}, {len(self.hosts)} hosts)"


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All valid generations. Servers use the generation `active`; clients try all."""

    host: str
    active: int
    generations: list[CurveGeneration]

    def __repr__(self) -> str:
        return f"CurveKeys({self.host}, {self.active} of {len(self.generations)})"

    def ordered(self) -> list[CurveGeneration]:
        """The active generation, then the others."""
        return sorted(self.generations, key=lambda each: each.number != self.active)

    def host_of(self, public: str) -> str:
        """The host with this public key; "" for an unknown key."""
        for generation in self.generations:
            for host, known in generation.hosts.items():
                if known == public:
                    return host
        return ""


class LiveFiles(Generic[T]):
    """The result of `read`, which is called again when one of the files changes. Thread-safe."""

    def __init__(self, paths: list[Path], read: Callable[[], T]) -> None:
        self._paths, self._read = paths, read
        self._held: tuple[object, T] | None = None
        self._logged = ""

    def get(self) -> T:
        """The latest valid result. KeysInvalid: `read` failed, and no call before has succeeded."""
        held = self._held
        try:
            stamp = [_stamp(path) for path in self._paths]
            if held is not None and held[0] == stamp:
                return held[1]
            value = self._read()
        except (OSError, ValueError, StoreError) as error:
            if held is None:
                if isinstance(error, StoreError):
                    raise
                raise KeysInvalid(f"cannot read {self._paths[0]}: {error}") from error
            if str(error) != self._logged:
                log.warning("changed keys cannot be used, the old ones stay in use: %s", error)
                self._logged = str(error)
            return held[1]
        self._held = (stamp, value)
        return value


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


class Keys:
    """The keys of one host, from its folder."""

    def __init__(self, folder: Path) -> None:
        """KeysInvalid: a file is missing or invalid, or a private file has unsafe permissions."""
        self.folder, self.certificate = folder, folder / CERTIFICATE
        self.private_key, self.authorities = folder / PRIVATE_KEY, folder / AUTHORITIES
        if found := problems(folder):
            raise KeysInvalid("; ".join(found))
        self._curve = LiveFiles([folder / ZEROMQ], self._read_curve)
        self._curve.get()

    def __repr__(self) -> str:
        return f"Keys({str(self.folder)!r})"

    @property
    def curve(self) -> CurveKeys:
        return self._curve.get()

    @property
    def secret(self) -> str:
        return (self.folder / SECRET).read_text().strip()

    def _read_curve(self) -> CurveKeys:
        path = self.folder / ZEROMQ
        try:
            found = msgspec.json.decode(path.read_bytes(), type=CurveKeys)
        except msgspec.MsgspecError as error:
            raise KeysInvalid(f"{path} cannot be read ({error}): copy the folder again") from error
        if found.active not in [each.number for each in found.generations]:
            raise KeysInvalid(f"{path} lacks its generation {found.active}: copy the folder again")
        return found


_made: dict[str, Keys] = {}


def of_process() -> Keys | None:
    """The keys of this process; None if MOONCAKE_KEYS is unset. KeysInvalid: they are unusable."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        return None
    if named not in _made:
        _made[named] = Keys(Path(named))
    return _made[named]


def problems(folder: Path) -> list[str]:
    """The reasons why this folder cannot be used."""
    if not folder.is_dir():
        return [
            f"there is no folder of keys at {folder}: make keys with `mooncake keys init`, copy "
            f"this host's folder here, and set {VARIABLE} to its path"
        ]
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        hosts = sorted(each.parent.name for each in folder.glob(f"*/{ZEROMQ}"))
        hint = f"; name the folder of one host ({', '.join(hosts)})" if hosts else ""
        return [f"{folder} has no {', '.join(missing)}{hint}"]
    return [
        f"other users may read or change {folder / name}: chmod 600 {folder / name}"
        for name in PRIVATE_FILES
        # The group may read, because Kubernetes mounts secrets this way for users other than root.
        if (folder / name).stat().st_mode & (stat.S_IWGRP | stat.S_IRWXO)
    ]


def folder_of_host(folder: Path, host: str) -> Path:
    """The folder with the keys of `host`: the subfolder of `folder` with this name. Without such a
    subfolder, `folder` itself, because an operator may copy only that host's folder."""
    inside = folder / host
    return inside if inside.is_dir() else folder
