"""Which tenant a key belongs to: the file of keys, read again when it changes. For several threads.

What cannot be read then (half written, a mistake, gone) is not taken: the keys of before go on, and
the log says why. A key is revoked by writing a file without it, never by removing the file.

A key that is asked for is hashed and looked up by a keyed hash of that, of which only this process
knows the key, and the found hash is compared in constant time: how long an answer takes says
nothing of the hashes in the file.

Not here: the file (tenants_file.py), how a frontend learns whose request it is (proof.py).
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
VARIABLE = "MOONCAKE_API_KEYS"  # a path, or the text of a file: it begins with {
KEY_BYTES = 32
KEY_PREFIX = "mk-"
KEY_CHARACTERS_MAX = 256  # nobody is hashed for longer


def environment(option: Path | None, env: Mapping[str, str]) -> dict[str, str]:
    """What the processes of a launch get: `option` before what `env` says; a path for wherever they
    run."""
    given = env.get(VARIABLE, "").strip() if option is None else str(option)
    if given and not given.startswith("{"):
        given = os.path.abspath(given)  # and no further: what it links to may be exchanged
    return {VARIABLE: given} if given else {}


def problems(option: Path | None, env: Mapping[str, str]) -> list[str]:
    """Why a launch cannot begin with these keys."""
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
    """One version of the file, ready to be asked."""

    tenants: dict[str, ApiTenant]
    by_digest: dict[bytes, tuple[str, str]]  # keyed hash of the SHA-256 -> (SHA-256, tenant)
    serves_keyless: bool
    pepper: bytes

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
    """TenantsInvalid when the file cannot be used at the start."""

    def __init__(self, path: Path | None, text: str = "") -> None:
        """Of a file, or of `text`, which never changes."""
        self._pepper = secrets.token_bytes(KEY_BYTES)
        self._files: LiveFiles[KeyTable] | None = None
        self._whole: KeyTable | None = None  # of the latest file that had no mistake
        if path is not None:
            tenants_file.read(path)  # with its own words
            self._files = LiveFiles([path], lambda: self._read(path))
            self._files.get()
        else:
            file = tenants_file.parse(text.encode(), VARIABLE)
            self._table = KeyTable.of(file, self._pepper)

    @classmethod
    def of(cls, given: str) -> ApiKeys | None:
        """A path or the text of a file; None of nothing."""
        if not given:
            return None
        return cls(None, given) if given.startswith("{") else cls(Path(given))

    @classmethod
    def of_process(cls) -> ApiKeys | None:
        """As MOONCAKE_API_KEYS says; None where there are no keys."""
        return cls.of(os.environ.get(VARIABLE, "").strip())

    def tenant_of(self, key: str) -> ApiTenant | None:
        """Whose key it is; None: nobody's."""
        return self._now().tenant_of(key)

    def tenant(self, name: str) -> ApiTenant | None:
        return self._now().tenants.get(name)

    @property
    def serves_keyless(self) -> bool:
        """Whether a request without a tenant is served, as one of the default tenant."""
        return self._now().serves_keyless

    @property
    def names(self) -> list[str]:
        """Of all tenants, the default one among them."""
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
            # Kept for this content: it is not read again at each request until it is mended.
            log.warning("keys are not read again: %s", error)
        return self._whole
