"""Key management of a cluster: its state, its hosts, and a renewal without interruption.

    keys/authority/state.json   generations, hosts, CURVE keys of hosts and directory, shared
                                secret (0600)
    keys/authority/ca-N.pem, ca-N.key   the certificate authority (CA) of generation N
    keys/HOST/                  the files that are copied to a host (folder.py), with its TLS key

The folder `authority` stays on the machine that makes the keys. A generation is a CA and the CURVE
keys of the directory and of all hosts. A renewal replaces the generation in three steps. After each
step an operator copies the hosts' folders. The launchers then restart the processes that read
certificates only at their start.

    1. prepare   the next generation is made and trusted; the current one is still used
    2. switch    the next generation is used; the old one is still trusted
    3. retire    the old generation is no longer trusted

Two hosts trust each other even if one of them still has the folder of the previous step.

Not here: reading a folder in a process (folder.py), the commands (command.py).
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import secrets
import time
from pathlib import Path

import msgspec
import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mooncake_store.errors import RequestInvalid
from mooncake_store.keys import folder as host_folder
from mooncake_store.keys.folder import MEMBER, CurveGeneration, CurveKeys
from mooncake_store.process.edited_file import replace_file

FOLDER, STATE = "authority", "state.json"
DAYS = 365  # default validity of a host's certificate; a CA's certificate is valid for 3,650 days
BACKDATED = datetime.timedelta(hours=1)  # certificates begin earlier, because clocks may be slow
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
STEPS = ("prepare", "switch", "retire")


class KeyPair(msgspec.Struct, frozen=True):
    public: str  # Z85, 40 characters
    secret: str  # Z85, 40 characters

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


class ClusterGeneration(msgspec.Struct):
    number: int  # generations are numbered from 1
    directory: KeyPair  # shared by all directories of the cluster
    hosts: dict[str, KeyPair]  # host -> its CURVE keys


class AuthorityState(msgspec.Struct):
    """State of the authority, as in state.json."""

    used: int  # number of the generation in use; the other one, if any, is only trusted
    secret: str  # shared secret of the cluster's processes
    hosts: dict[str, bool]  # host -> whether a directory may run there
    generations: list[ClusterGeneration]  # one, or two during a renewal: old, new
    # host -> IP address or DNS name in its certificate, if one was given
    addresses: dict[str, str] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"AuthorityState({self.used}, {list(self.hosts)})"

    @property
    def next_step(self) -> str:
        """The next step of a renewal, which `rotate` takes."""
        if len(self.generations) == 1:
            return "prepare"
        return "switch" if self.used == self.generations[0].number else "retire"

    @property
    def steps_to_forget(self) -> int:
        """Number of `rotate` calls until every current generation is retired. Only these calls end
        the access of a removed host, because it still has the keys of all these generations. During
        a renewal, the remaining steps of this renewal and all steps of another one count."""
        left = len(STEPS) - STEPS.index(self.next_step)
        return left if len(self.generations) == 1 else left + len(STEPS)


class Authority:
    """The authority of one cluster, in the folder where its keys are made."""

    def __init__(self, path: Path, state: AuthorityState) -> None:
        self.path, self.state = path, state

    @classmethod
    def begun(cls, path: Path) -> Authority:
        """Create the keys of a cluster without hosts. RequestInvalid: the folder has keys."""
        if (path / FOLDER).exists():
            raise RequestInvalid(
                f"{path} already has keys: add hosts (mooncake keys add-host) or renew the keys "
                "(mooncake keys rotate)"
            )
        (path / FOLDER).mkdir(parents=True, mode=0o700)
        made = cls(path, AuthorityState(1, secrets.token_hex(16), {}, []))
        made._add_generation(1)
        made._write()
        return made

    @classmethod
    def read(cls, path: Path) -> Authority:
        try:
            raw = (path / FOLDER / STATE).read_bytes()
            return cls(path, msgspec.json.decode(raw, type=AuthorityState))
        except FileNotFoundError:
            raise RequestInvalid(
                f"no keys are made in {path}: start with `mooncake keys init {path}`"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise RequestInvalid(f"{path / FOLDER / STATE} cannot be read: {error}") from error

    # ---- hosts

    def add_host(
        self, host: str, may_direct: bool | None = None, days: float = DAYS, address: str = ""
    ) -> None:
        """Make keys for a new host, or a new certificate for a known host. `may_direct`: whether a
        directory may run there; None: as before, or True for a new host. `days`: validity of the
        certificate. `address`: an IP address or a DNS name, required for a host that runs a member
        of etcd; "": as before."""
        if not NAME.fullmatch(host) or host == FOLDER:
            raise RequestInvalid(f"{host!r} is not a valid host name: use a-z, 0-9, - and .")
        if address:
            _general_name(address)
            self.state.addresses[host] = address
        as_it_is = self.state.hosts.get(host, True)
        self.state.hosts[host] = as_it_is if may_direct is None else may_direct
        for generation in self.state.generations:
            if host not in generation.hosts:
                generation.hosts[host] = _key_pair()
        self._write(days, [host])

    def remove_host(self, host: str) -> None:
        """Remove a host. Hosts to which the new folders are copied reject its CURVE key. Its
        certificate stays valid until its generation is retired (steps_to_forget)."""
        if host not in self.state.hosts:
            raise RequestInvalid(
                f"there is no host {host}; known hosts: {', '.join(self.state.hosts)}"
            )
        del self.state.hosts[host]
        self.state.addresses.pop(host, None)
        for generation in self.state.generations:
            generation.hosts.pop(host, None)
        self._write(hosts=[])  # first, because the deletions may fail, and they revoke nothing
        for name in host_folder.FILES:
            (self.path / host / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder was moved, or has other files
            (self.path / host).rmdir()

    # ---- renewal

    def age_s(self) -> float:
        """Seconds since the state was last written."""
        return max(0.0, time.time() - (self.path / FOLDER / STATE).stat().st_mtime)

    def rotate(self, days: float = DAYS) -> str:
        """Take the next step of a renewal; returns the step's name. `days`: validity of the hosts'
        new certificates."""
        step, state = self.state.next_step, self.state
        if step == "prepare":
            self._add_generation(state.used + 1)
        elif step == "switch":
            state.used = state.generations[1].number
        else:
            old = state.generations.pop(0)
            (self.path / FOLDER / f"ca-{old.number}.key").unlink(missing_ok=True)
        self._write(days)
        return step

    def _add_generation(self, number: int) -> None:
        hosts = {host: _key_pair() for host in self.state.hosts}
        self.state.generations.append(ClusterGeneration(number, _key_pair(), hosts))
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"mooncake authority {number} {secrets.token_hex(4)}")
        certificate = (
            _builder(name, name, key.public_key(), 10 * DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(is_authority=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(self.path / FOLDER / f"ca-{number}.key", _private_bytes(key), is_private=True)
        _write(self._authority(number), certificate.public_bytes(serialization.Encoding.PEM))

    def _authority(self, number: int) -> Path:
        return self.path / FOLDER / f"ca-{number}.pem"

    # ---- the folders of the hosts

    def _write(self, days: float = DAYS, hosts: list[str] | None = None) -> None:
        """Write the state and all hosts' folders. `hosts`: those that get new certificates; None:
        all hosts."""
        raw = msgspec.json.format(msgspec.json.encode(self.state))
        _write(self.path / FOLDER / STATE, raw, is_private=True)
        numbers = [each.number for each in self.state.generations]
        bundle = b"".join(self._authority(number).read_bytes() for number in numbers)
        for host in self.state.hosts:
            place = self.path / host
            place.mkdir(mode=0o700, exist_ok=True)
            curve = msgspec.json.encode(self._curve(host))
            _write(place / host_folder.SECRET, self.state.secret.encode(), is_private=True)
            _write(place / host_folder.AUTHORITIES, bundle)
            _write(place / host_folder.ZEROMQ, msgspec.json.format(curve), is_private=True)
            if hosts is None or host in hosts:
                self._certify(host, days)

    def _curve(self, host: str) -> CurveKeys:
        may_direct = self.state.hosts[host]
        return CurveKeys(
            host,
            self.state.used,
            [
                CurveGeneration(
                    number=each.number,
                    directory_public=each.directory.public,
                    own_public=each.hosts[host].public,
                    own_secret=each.hosts[host].secret,
                    hosts={name: pair.public for name, pair in each.hosts.items()},
                    directory_secret=each.directory.secret if may_direct else "",
                )
                for each in self.state.generations
            ],
        )

    def _certify(self, host: str, days: float) -> None:
        """Make a TLS key and a certificate for a host, signed by the CA in use. The certificate
        names MEMBER, for all mooncake processes, and the host's address, for members of etcd."""
        authority = x509.load_pem_x509_certificate(self._authority(self.state.used).read_bytes())
        signing = serialization.load_pem_private_key(
            (self.path / FOLDER / f"ca-{self.state.used}.key").read_bytes(), None
        )
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        address = self.state.addresses.get(host, "")
        names = [x509.DNSName(MEMBER), *([_general_name(address)] if address else [])]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(host), authority.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(signing, hashes.SHA256())
        )
        place = self.path / host
        _write(place / host_folder.PRIVATE_KEY, _private_bytes(key), is_private=True)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        _write(place / host_folder.CERTIFICATE, pem)


def _key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(address: str) -> x509.GeneralName:
    """The address of a host as a subjectAltName entry."""
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        if not ADDRESS.fullmatch(address):
            raise RequestInvalid(
                f"{address!r} is neither an IP address nor a DNS name (without a port)"
            ) from None
        return x509.DNSName(address)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Tests make an expired certificate with days < 0. Its validity must begin before it ends.
        .not_valid_before(
            now - BACKDATED + min(datetime.timedelta(days=days), datetime.timedelta())
        )
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, raw: bytes, is_private: bool = False) -> None:
    """Replace a file atomically. A private file is never readable by other users."""
    mode = 0o600 if is_private else 0o644
    replace_file(path, raw, lambda descriptor: os.fchmod(descriptor, mode))
