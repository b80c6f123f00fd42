"""The file of tenants and their API keys: its format, validation and writing.

    {
      "tenants": {
        "acme": {"priority": 1, "requests_per_minute": 600, "tokens_per_minute": 100000,
                 "requests_in_flight_max": 16}
      },
      "keys": [{"sha256": "9f86d0...", "tenant": "acme", "note": "billing service"}]
    }

The file has the SHA-256 of each key, never a key. A key is 256 random bits, so inverting its
SHA-256 is as hard as guessing the key. A slow password hash would add no safety.

Not here: reading the file again when it changes, and looking keys up (api_keys.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import msgspec

from conductor.messages import TenantLimits
from mooncake_store.block_keys import SALT_SEPARATOR
from mooncake_store.process.edited_file import replace_file

DEFAULT = "default"  # tenant of requests that name no tenant; its cache salt is always empty
KEYLESS = ("served", "refused")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
SALT_BYTES_MAX = 256  # limit of a request's parameter `tenant` too
PRIORITY_MAX = 2**31 - 1
LIMITS = tuple(field.name for field in fields(TenantLimits))
LIMIT_MAX = 2**53  # a float represents every integer up to this one


class TenantsInvalid(Exception):
    """The file cannot be used. The message lists all wrong values. If the JSON is invalid, or a
    field is unknown or has the wrong type, the message names only the first such mistake."""


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tenant in the file. A limit is >= 1; None means no limit."""

    salt: str | None = None  # None: the tenant's name. Tenants with equal salts share cached KV
    priority: int = 0  # below 0: rejected earlier under load; above 0: later
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # tokens of prompts and answers
    requests_in_flight_max: int | None = None
    operator: bool = False  # True: the tenant's keys show all tenants' decisions (status page)
    # Limit of the responses that /v1/responses keeps for the tenant (`store`); 0: it keeps none.
    stored_responses_bytes_max: int = 0


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    sha256: str
    tenant: str
    note: str = ""

    @property
    def key_id(self) -> str:
        """A short id of the key. It may be shown, because it cannot be used as a key."""
        return self.sha256[:12]


class TenantsFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    tenants: dict[str, TenantEntry] = {}
    keys: list[KeyEntry] = []
    # A request at Triton's own ports that names no tenant is "served" (as DEFAULT's) or "refused".
    keyless: str = "served"


class ApiTenant(msgspec.Struct, frozen=True):
    """A TenantEntry with its name, and with its defaults filled in."""

    name: str
    salt: str
    priority: int = 0
    limits: TenantLimits = TenantLimits()
    is_operator: bool = False
    stored_responses_bytes_max: int = 0

    @property
    def has_rates(self) -> bool:
        return not (self.limits.requests_per_minute is None is self.limits.tokens_per_minute)


def tenant_of_entry(name: str, entry: TenantEntry) -> ApiTenant:
    salt = name if entry.salt is None else entry.salt
    return ApiTenant(
        name=name,
        salt="" if name == DEFAULT else salt,
        priority=entry.priority,
        limits=TenantLimits(**{name: getattr(entry, name) for name in LIMITS}),
        is_operator=entry.operator,
        stored_responses_bytes_max=entry.stored_responses_bytes_max,
    )


def read(path: Path) -> TenantsFile:
    """The parsed file. Raises TenantsInvalid."""
    return parse(content(path), str(path))


def content(path: Path) -> bytes:
    """The file's bytes. Raises TenantsInvalid if this process cannot read the file, if other users
    have any access to it, or if the group may write it."""
    try:
        mode = path.stat().st_mode
        raw = path.read_bytes()
    except OSError as error:
        raise TenantsInvalid(
            f"{path} cannot be read ({error.strerror}); a missing file is created by "
            f"`mooncake tenants add {path} NAME`"
        ) from error
    # The group may read the file, as Kubernetes mounts a secret for a user that is not root.
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise TenantsInvalid(f"too many users have access to {path}: run chmod g-w,o= {path}")
    return raw


def parse(raw: bytes, what: str) -> TenantsFile:
    """The parsed content. Raises TenantsInvalid. `what`: name of the file in error messages."""
    try:
        found = msgspec.json.decode(raw, type=TenantsFile)
    except msgspec.MsgspecError as error:
        raise TenantsInvalid(f"{what}: {error}") from error
    if problems := list(problems_of(found)):
        lines = "\n".join(f"  - {line}" for line in problems)
        raise TenantsInvalid(f"{what} has {len(problems)} mistake(s):\n{lines}")
    return found


def problems_of(file: TenantsFile) -> Iterator[str]:
    if file.keyless not in KEYLESS:
        yield f"keyless is {file.keyless!r}; use {' or '.join(KEYLESS)}"
    for name, entry in file.tenants.items():
        yield from _problems_of_tenant(name, entry)
    seen: dict[str, int] = {}
    for index, key in enumerate(file.keys):
        if not SHA256.fullmatch(key.sha256):
            yield f"keys[{index}].sha256 is not a SHA-256 of 64 hex digits in lower case"
        elif key.sha256 in seen:
            yield f"keys[{index}] is the same key as keys[{seen[key.sha256]}]; remove one of them"
        seen.setdefault(key.sha256, index)
        if key.tenant not in file.tenants:
            yield f"keys[{index}].tenant is {key.tenant!r}, which is not in tenants"


def _problems_of_tenant(name: str, entry: TenantEntry) -> Iterator[str]:
    if not NAME.fullmatch(name):
        yield (
            f"tenant {name!r}: a name has 1 to 64 of a-z, A-Z, 0-9, '.', '_' and '-', and begins "
            "and ends with a letter or digit"
        )
    if entry.salt is not None and len(entry.salt.encode()) > SALT_BYTES_MAX:
        yield f"tenant {name!r}: its salt is longer than {SALT_BYTES_MAX} bytes"
    if SALT_SEPARATOR in (entry.salt or ""):
        yield f"tenant {name!r}: its salt has {SALT_SEPARATOR!r}; leave it out"
    if name == DEFAULT and entry.salt:
        yield f"tenant {name!r}: remove its salt; it shares KV with all requests without a tenant"
    if abs(entry.priority) > PRIORITY_MAX:
        yield f"tenant {name!r}: priority is {entry.priority}; at most +-{PRIORITY_MAX}"
    if not 0 <= entry.stored_responses_bytes_max <= LIMIT_MAX:
        yield f"tenant {name!r}: stored_responses_bytes_max is below 0 or above {LIMIT_MAX}"
    for limit in LIMITS:
        value = getattr(entry, limit)
        if value is not None and not 1 <= value <= LIMIT_MAX:
            yield f"tenant {name!r}: {limit} is {value}; use 1 to {LIMIT_MAX}, or null for no limit"


def write(path: Path, file: TenantsFile) -> None:
    """Replace the file atomically. The caller must hold the lock `sole_writer` of the file's folder
    (mooncake_store/process/edited_file.py). Raises OSError, or TenantsInvalid for mistakes."""
    if problems := list(problems_of(file)):
        raise TenantsInvalid("\n".join(problems))
    raw = msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
    replace_file(path, raw, lambda descriptor: _keep_readers(descriptor, path))


def _keep_readers(descriptor: int, path: Path) -> None:
    """Copy owner, group and the group's read permission from the old file at `path`. A service
    that runs as another user can then still read the file. If chown fails, only this user can."""
    os.fchmod(descriptor, 0o600)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        before = path.stat()
        os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, 0o600 | before.st_mode & stat.S_IRGRP)
