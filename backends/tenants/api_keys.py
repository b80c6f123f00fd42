"""Looks up the tenant of an API key. Reads the file of keys again when it changes. Thread-safe.

If the changed file cannot be used (half written, invalid, gone), the previous keys stay valid and
the log has the reason. Therefore an operator revokes a key by removing it from the file. Removing
the file revokes no key.

The lookup table is indexed by a keyed BLAKE2b hash of each API key's SHA-256. The key of this hash
(`pepper`) is random in each process, and the SHA-256 found is compared in constant time. So
response times reveal nothing about the hashes in the file.

Not here: the file's format (tenants_file.py), proving the tenant to a frontend (proof.py).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.tenants import tenants_file
from backends.tenants.tenants_file import DEFAULT, ApiTenant, TenantsFile, TenantsInvalid
from mooncake_store.errors import StoreError
from mooncake_store.keys.folder import LiveFiles

log = logging.getLogger(__name__)
VARIABLE = "MOONCAKE_API_KEYS"  # path of the file, or its JSON text, which begins with {
KEY_BYTES = 32  # random bytes of an API key
KEY_PREFIX = "mk-"
KEY_CHARACTERS_MAX = 256  # longer keys are rejected without hashing


def environment(option: Path | None, env: Mapping[str, str]) -> dict[str, str]:
    """VARIABLE for the launched processes, from `option` or else from `env`, with absolute path."""
    given = env.get(VARIABLE, "").strip() if option is None else str(option)
    if given and not given.startswith("{"):
        given = os.path.abspath(given)  # keeps symbolic links, because their targets may change
    return {VARIABLE: given} if given else {}


def problems(option: Path | None, env: Mapping[str, str]) -> list[str]:
    """Why `mooncake serve` cannot start with these keys; [] if it can."""
    try:
        ApiKeys.of(environment(option, env).get(VARIABLE, ""))
    except TenantsInvalid as error:
        return [str(error)]
    return []


def make_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def sha256_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The content of one version of the file, indexed for lookups."""

    tenants: dict[str, ApiTenant]
    by_digest: dict[bytes, tuple[str, str]]  # keyed hash of the SHA-256 -> (SHA-256, tenant)
    serves_keyless: bool  # True: requests without a tenant are served as the default tenant's
    pepper: bytes  # key of the keyed hash

    @classmethod
    def of(cls, file: TenantsFile, pepper: bytes) -> KeyTable:
        tenants = {
            name: tenants_file.tenant_of_entry(name, entry) for name, entry in file.tenants.items()
        }
        tenants.setdefault(DEFAULT, ApiTenant(DEFAULT, ""))
        by_digest = {_digest(key.sha256, pepper): (key.sha256, key.tenant) for key in file.keys}
        return cls(tenants, by_digest, file.keyless == "served", pepper)

    def tenant_of(self, key: str) -> ApiTenant | None:
        if not key or len(key) > KEY_CHARACTERS_MAX:
            return None
        given = sha256_of(key)
        known, name = self.by_digest.get(_digest(given, self.pepper), ("", ""))
        return self.tenants[name] if hmac.compare_digest(given, known) else None


def _digest(sha256: str, pepper: bytes) -> bytes:
    return hashlib.blake2b(sha256.encode(), digest_size=16, key=pepper).digest()


class ApiKeys:
    def __init__(self, path: Path | None, text: str = "") -> None:
        """Read the file at `path`, or `text` if `path` is None. Raises TenantsInvalid."""
        self._pepper = secrets.token_bytes(KEY_BYTES)
        self._files: LiveFiles[KeyTable] | None = None
        self._whole: KeyTable | None = None  # table of the file's latest valid content
        if path is not None:
            tenants_file.read(path)  # raises TenantsInvalid, while LiveFiles raises StoreError
            self._files = LiveFiles([path], lambda: self._read(path))
            self._files.get()
        else:
            file = tenants_file.parse(text.encode(), VARIABLE)
            self._table = KeyTable.of(file, self._pepper)

    @classmethod
    def of(cls, given: str) -> ApiKeys | None:
        """The keys in a file. `given`: its path or its text; "": None. Raises TenantsInvalid."""
        if not given:
            return None
        return cls(None, given) if given.startswith("{") else cls(Path(given))

    @classmethod
    def of_process(cls) -> ApiKeys | None:
        """The keys that MOONCAKE_API_KEYS of this process names; None if it is not set."""
        return cls.of(os.environ.get(VARIABLE, "").strip())

    def tenant_of(self, key: str) -> ApiTenant | None:
        """The tenant of an API key; None for an unknown key."""
        return self._now().tenant_of(key)

    def tenant(self, name: str) -> ApiTenant | None:
        return self._now().tenants.get(name)

    @property
    def serves_keyless(self) -> bool:
        """Whether requests without a tenant are served, as the default tenant's."""
        return self._now().serves_keyless

    @property
    def names(self) -> list[str]:
        """Names of all tenants, including the default tenant."""
        return list(self._now().tenants)

    def _now(self) -> KeyTable:
        return self._files.get() if self._files is not None else self._table

    def _read(self, path: Path) -> KeyTable:
        try:
            raw = tenants_file.content(path)
        except TenantsInvalid as error:
            raise StoreError(str(error)) from error
        try:
            self._whole = KeyTable.of(tenants_file.parse(raw, str(path)), self._pepper)
        except TenantsInvalid as error:
            if self._whole is None:
                raise StoreError(str(error)) from error
            # LiveFiles keeps the returned old table until the file changes again.
            log.warning("changed keys cannot be used, the old ones stay in use: %s", error)
        return self._whole
