"""HTTPS with certificates of an authority: who is answered, who is not, and a renewal on disk."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from backends import launch_secret
from backends.gateway.app import PATHS
from backends.gateway.request.fields import CHAT
from backends.gateway.server import Listening, tls_context
from backends.tenants import ApiKeys
from mooncake_store.keys.folder import KeysInvalid
from tests.backends.gateway.rig import KEYS, PROMPT, SECRET, WAIT_S_MAX, Rig, run, until


class Authority:
    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate = self._signed(self._name, self._key.public_key(), is_authority=True)

    @property
    def trust(self) -> ssl.SSLContext:
        """Of a client that believes this one alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=pem(self.certificate).decode())
        return context

    def write(self, folder: Path) -> Listening:
        """A certificate for 127.0.0.1, in the same two files each time."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        certificate, private_key = folder / "certificate.pem", folder / "key.pem"
        for path, content in (
            (private_key, private),
            (certificate, pem(self._signed(name, key.public_key()))),
        ):
            path.with_suffix(".new").write_bytes(content)
            path.with_suffix(".new").replace(path)
        return Listening("127.0.0.1", 0, False, str(certificate), str(private_key))

    def _signed(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True, slots=True)
class Shown:
    serial: bytes  # the whole certificate
    version: str | None


async def shown(rig: Rig, trust: ssl.SSLContext) -> Shown:
    """What a client that believes `trust` is shown; ssl.SSLError when it does not believe it."""
    _, writer = await asyncio.open_connection("127.0.0.1", rig.port, ssl=trust)
    connection = writer.get_extra_info("ssl_object")
    writer.close()
    return Shown(connection.getpeercert(binary_form=True), connection.version())


def test_who_believes_the_authority_is_answered_and_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")

    async def check(rig: Rig) -> None:
        url = f"https://127.0.0.1:{rig.port}/v1"
        http = openai.DefaultAsyncHttpxClient(verify=ours.trust, trust_env=False)
        async with openai.AsyncOpenAI(base_url=url, api_key="key-of-acme", http_client=http) as one:
            answer = await one.completions.create(model="demo", prompt="hi", max_tokens=2)
            assert answer.choices[0].text == " word word"
            stream = await one.completions.create(
                model="demo", prompt="hi", max_tokens=2, stream=True
            )
            assert len([each async for each in stream]) == 2
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(rig, theirs.trust)
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        body = json.dumps(PROMPT[CHAT])
        writer.write(
            f"POST {PATHS[CHAT]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-acme\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), WAIT_S_MAX), "not in plain"
        writer.close()
        assert len(rig.frontend.requests) == 2
        await until(lambda: not rig.server.server_state.connections)

    caplog.set_level(logging.WARNING)
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, SECRET)
    run(check, ApiKeys(None, json.dumps(KEYS)), ours.write(tmp_path))
    assert not caplog.records, "what anybody may send fills no log"


def test_a_certificate_renewed_on_disk_is_shown_to_the_next_client(tmp_path: Path) -> None:
    ours = Authority("ours")

    async def check(rig: Rig) -> None:
        first = await shown(rig, ours.trust)
        _, open_before = await asyncio.open_connection("127.0.0.1", rig.port, ssl=ours.trust)
        ours.write(tmp_path)
        second = await shown(rig, ours.trust)
        assert first.serial != second.serial and first.version == second.version == "TLSv1.3"
        (tmp_path / "certificate.pem").write_text("half of one")
        assert await shown(rig, ours.trust) == second, "the last that was whole"
        (tmp_path / "key.pem").unlink()
        assert await shown(rig, ours.trust) == second
        ours.write(tmp_path)
        assert (await shown(rig, ours.trust)).serial not in (first.serial, second.serial)
        assert not open_before.transport.is_closing(), "who is connected goes on"
        open_before.close()

    run(check, listening=ours.write(tmp_path))


def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    listening = Authority("ours").write(tmp_path)
    Path(listening.certificate).write_text("none")
    with pytest.raises(KeysInvalid, match=r"certificate\.pem"):
        tls_context(listening)
