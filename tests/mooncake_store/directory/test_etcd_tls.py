"""Calls of etcd with keys: whose name is asked for, and what they leave of the TLS of others."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mooncake_store.directory.etcd import EtcdAccessRefused, EtcdClient
from mooncake_store.keys import authority, folder
from mooncake_store.keys.tls import TlsContexts, contexts_of_process
from tests.mooncake_store.keys.hosts import Hosts


class EmptyEtcd(BaseHTTPRequestHandler):
    """It has no key at all."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path / "keys", monkeypatch)


@pytest.fixture
def member(hosts: Hosts) -> Iterator[HTTPServer]:
    """With the certificate of host a; this process is host b."""
    hosts.be("b")
    made = HTTPServer(("127.0.0.1", 0), EmptyEtcd)
    yield made
    made.server_close()


def serve(member: HTTPServer, context: ssl.SSLContext) -> str:
    member.socket = context.wrap_socket(member.socket, server_side=True)
    threading.Thread(target=member.serve_forever, daemon=True).start()
    return f"https://127.0.0.1:{member.server_address[1]}"


def test_a_call_leaves_the_check_of_names_to_all_others(hosts: Hosts, member: HTTPServer) -> None:
    url = serve(member, TlsContexts(hosts.keys("a")).server)
    assert EtcdClient([url], timeout_s=30.0).get("key").mod_revision == 0
    contexts = contexts_of_process()
    assert contexts is not None
    assert contexts.client.check_hostname and contexts.client.verify_mode is ssl.CERT_REQUIRED
    assert contexts.http_client.check_hostname
    member.shutdown()


def test_a_certificate_of_another_name_is_not_believed(
    hosts: Hosts, member: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed by the cluster's authority, as for another use."""
    with monkeypatch.context() as patched:
        patched.setattr(authority, "MEMBER", f"not.{folder.MEMBER}")
        hosts.authority.add_host("a")
    url = serve(member, TlsContexts(hosts.keys("a")).server)
    with pytest.raises(EtcdAccessRefused, match="is not trusted"):
        EtcdClient([url], timeout_s=30.0).get("key")
    member.shutdown()
