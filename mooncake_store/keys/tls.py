"""Mutual TLS from a folder of keys: ssl contexts, and checks of a certificate.

Both sides present the certificate of their host and trust the authorities in the folder. When the
files change, new connections use the new files. Open connections continue.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from mooncake_store.keys.folder import (
    AUTHORITIES,
    CERTIFICATE,
    PRIVATE_KEY,
    VARIABLE,
    Keys,
    KeysInvalid,
    LiveFiles,
    of_process,
)


class TlsContexts:
    """TLS contexts of one host. The server context requires a certificate from clients."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        paths = [keys.certificate, keys.private_key, keys.authorities]
        self._contexts = LiveFiles(paths, self._made)

    @property
    def server(self) -> ssl.SSLContext:
        return self._contexts.get()[0]

    @property
    def client(self) -> ssl.SSLContext:
        return self._contexts.get()[1]

    @property
    def http_client(self) -> ssl.SSLContext:
        """Like `client`, but a separate object, because libraries (urllib3) change it."""
        return self._contexts.get()[2]

    def _made(self) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_REQUIRED
        client, http_client = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
        for context in (server, client, http_client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_cert_chain(self._keys.certificate, self._keys.private_key)
                context.load_verify_locations(self._keys.authorities)
            except ssl.SSLError as error:
                raise KeysInvalid(
                    f"the certificate in {self._keys.folder} cannot be used ({error.reason}): "
                    "copy the whole folder again"
                ) from error
        server.num_tickets = 0  # no session tickets, because clients connect rarely
        return server, client, http_client


_contexts: dict[Keys, TlsContexts] = {}


def contexts_of_process() -> TlsContexts | None:
    """The TLS contexts of this process; None without keys, for connections without TLS."""
    keys = of_process()
    if keys is None:
        return None
    if keys not in _contexts:
        _contexts[keys] = TlsContexts(keys)
    return _contexts[keys]


def refusal_words(who: str, error: ssl.SSLError) -> str:
    """Error text for a failed handshake, from the client's side."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{who} is not trusted: {error.verify_message}. Its host's certificate is of another "
            "cluster or generation, or has expired (`mooncake keys check` there), or a clock is "
            "wrong"
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "wrong version number" in reason or "record layer failure" in reason:
        return (
            f"{who} uses plain TCP, and this process has keys: restart that one with {VARIABLE} set"
        )
    return (
        f"{who} refuses this host's certificate ({reason}). The certificate is of another cluster "
        "or generation, or has expired (`mooncake keys check` here), or a clock is wrong"
    )


def certificate_in(folder: Path) -> x509.Certificate:
    """The host's certificate in a folder of keys. OSError, ValueError: it cannot be read."""
    return x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())


def certificate_problems(
    keys: Keys, warn_before: datetime.timedelta = datetime.timedelta(), address: str = ""
) -> list[str]:
    """Reasons why peers reject this host's certificate now, or will reject it in `warn_before`.
    `address`: an address that the certificate must name; "": none."""
    try:
        certificate = certificate_in(keys.folder)
        authorities = x509.load_pem_x509_certificates(keys.authorities.read_bytes())
        private = serialization.load_pem_private_key(keys.private_key.read_bytes(), None)
    except (ValueError, OSError) as error:
        return [f"the certificate in {keys.folder} cannot be read: {error}"]
    found = []
    if address and not _is_named(certificate, address):
        host = certificate.subject.rfc4514_string().removeprefix("CN=")
        found.append(
            f"{keys.certificate} does not name {address}, which members of etcd check: run "
            f"`mooncake keys add-host FOLDER {host}={address}` where keys are made, and copy the "
            "folder"
        )
    now = datetime.datetime.now(datetime.timezone.utc)
    renew = "renew it (mooncake keys rotate, or add-host again) and copy the folder"
    begins, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        found.append(f"{keys.certificate} is valid from {begins:%Y-%m-%d} on: a clock is wrong")
    if now > until:
        found.append(f"{keys.certificate} expired on {until:%Y-%m-%d}: {renew}")
    elif now > until - warn_before:
        found.append(f"{keys.certificate} expires on {until:%Y-%m-%d}: {renew}")
    if private.public_key() != certificate.public_key():
        found.append(
            f"{keys.folder / PRIVATE_KEY} is not its certificate's key: copy the folder again"
        )
    if not any(_has_signed(authority, certificate) for authority in authorities):
        found.append(
            f"{keys.certificate} is signed by none of the authorities in {AUTHORITIES}: copy the "
            "whole folder again"
        )
    return found


def _is_named(certificate: x509.Certificate, address: str) -> bool:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        wanted = ipaddress.ip_address(address)
    except x509.ExtensionNotFound:
        return False
    except ValueError:
        return address.lower() in map(str.lower, names.get_values_for_type(x509.DNSName))
    return wanted in names.get_values_for_type(x509.IPAddress)


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # another issuer or a wrong signature; the errors have several classes
        return False
    return True
