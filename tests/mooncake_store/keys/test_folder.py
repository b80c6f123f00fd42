"""Folders of keys: private, whole or refused, and silent about what is in them."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from mooncake_store.errors import RequestInvalid
from mooncake_store.keys import folder as key_folder
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.command import app
from mooncake_store.keys.folder import (
    FILES,
    PRIVATE_FILES,
    Keys,
    KeysInvalid,
    folder_of_host,
    of_process,
)
from mooncake_store.keys.tls import certificate_problems
from mooncake_store.transports.host_topology import TRUSTED_NICS, host_data_network
from tests.mooncake_store.keys.hosts import Hosts


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_private_is_readable_by_its_user_only(hosts: Hosts) -> None:
    for host in ("a", "b", "c"):
        assert mode(hosts.ours / host) == 0o700
        for name in PRIVATE_FILES:
            assert mode(hosts.ours / host / name) == 0o600, name
    assert mode(hosts.ours / "authority") == 0o700
    for path in (hosts.ours / "authority").iterdir():
        assert path.suffix == ".pem" or mode(path) == 0o600, path


@pytest.mark.parametrize("name", PRIVATE_FILES)
@pytest.mark.parametrize("bits", [0o644, 0o660, 0o604])
def test_a_private_file_that_others_may_read_is_refused_with_the_remedy(
    hosts: Hosts, name: str, bits: int
) -> None:
    (hosts.ours / "a" / name).chmod(bits)
    with pytest.raises(KeysInvalid, match=f"chmod 600 .*{name}"):
        hosts.keys("a")


def test_a_group_may_read_them_as_kubernetes_mounts_secrets(hosts: Hosts) -> None:
    for name in PRIVATE_FILES:
        (hosts.ours / "a" / name).chmod(0o440)
    assert hosts.keys("a").curve.host == "a"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_named(hosts: Hosts, name: str) -> None:
    (hosts.ours / "a" / name).unlink()
    with pytest.raises(KeysInvalid, match=name):
        hosts.keys("a")


def test_the_folder_of_all_hosts_is_no_host_s(hosts: Hosts, tmp_path: Path) -> None:
    with pytest.raises(KeysInvalid, match="name the folder of one host"):
        Keys(hosts.ours)
    with pytest.raises(KeysInvalid, match="there is no folder of keys"):
        Keys(tmp_path / "nowhere")
    assert folder_of_host(hosts.ours, "b") == hosts.ours / "b"
    assert folder_of_host(hosts.ours / "b", "b") == hosts.ours / "b"


def test_a_process_without_the_variable_has_no_keys(hosts: Hosts) -> None:
    hosts.be("")
    assert of_process() is None
    hosts.be("a")
    assert of_process() is of_process() is not None


def test_a_folder_that_is_half_copied_changes_nothing_until_it_is_whole(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    keys = hosts.keys("a")
    path = hosts.ours / "a" / key_folder.ZEROMQ
    whole, before = path.read_bytes(), keys.curve
    path.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        assert keys.curve == before
    assert "the old ones stay in use" in caplog.text
    path.unlink()
    assert keys.curve == before
    hosts.authority.rotate()
    assert len(keys.curve.generations) == 2


def secrets_of(hosts: Hosts) -> list[str]:
    state = hosts.authority.state
    pairs = [pair for each in state.generations for pair in (each.directory, *each.hosts.values())]
    private = (hosts.ours / "a" / key_folder.PRIVATE_KEY).read_text().splitlines()[1]
    return [state.secret, private, *(pair.secret for pair in pairs)]


def test_nothing_private_is_shown_by_anything_that_is_printed(hosts: Hosts) -> None:
    keys = hosts.keys("a")
    shown = f"{keys!r} {keys.curve!r} {keys.curve.generations!r} {hosts.authority.state!r}"
    shown += repr(hosts.authority.state.generations)
    for words in (["show"], ["check"], ["rotate"], ["show"], ["add-host", "--days", "1"]):
        arguments = [words[0], str(hosts.ours), *(["d"] if words[0] == "add-host" else [])]
        result = CliRunner().invoke(app, [*arguments, *words[1:]])
        shown += result.output
    assert "generations trusted: 1, 2" in shown
    for secret in secrets_of(hosts):
        assert secret not in shown


def test_the_commands_take_a_cluster_through_its_life(tmp_path: Path) -> None:
    folder, run = str(tmp_path / "keys"), CliRunner().invoke
    assert run(app, ["init", folder, "--host", "a", "--host", "b"]).exit_code == 0
    assert "has keys" in run(app, ["init", folder]).output
    added = run(app, ["add-host", folder, "c=10.77.0.3"])
    assert added.exit_code == 0 and f"host c in {folder}/c" in added.output
    refused = run(app, ["add-host", folder, "d=10.77.0.3:2379"])
    assert refused.exit_code == 1 and "neither an IP address nor a DNS name" in refused.output
    assert run(app, ["add-host", folder, "w", "--no-directory"]).exit_code == 0
    assert "w: certificate until" in (shown := run(app, ["show", folder]).output)
    assert "c: certificate of 10.77.0.3 until" in shown
    assert "without the directory's key" in shown
    for step in ("prepare", "switch", "retire"):
        if step != "prepare":
            refused = run(app, ["rotate", folder])
            assert refused.exit_code == 1 and "hosts need minutes" in refused.output
        assert run(app, ["rotate", folder, "--now"]).output.startswith(step)
        assert run(app, ["check", folder]).exit_code == 0
        assert certificate_problems(Keys(tmp_path / "keys" / "c"), address="10.77.0.3") == []
    assert run(app, ["add-host", folder, "w"]).exit_code == 0
    assert "without the directory's key" in run(app, ["show", folder]).output, "as it was"
    removed = run(app, ["remove-host", folder, "w"])
    assert removed.exit_code == 0 and "rotate 3 times" in removed.output
    assert not (tmp_path / "keys" / "w").exists()
    assert "there is no host w" in run(app, ["remove-host", folder, "w"]).output
    assert "no keys are made in" in run(app, ["show", str(tmp_path)]).output


@pytest.mark.parametrize(("steps_before", "steps"), [(0, 3), (1, 5), (2, 4), (3, 3)])
def test_what_a_removed_host_holds_is_believed_until_the_last_step(
    hosts: Hosts, tmp_path: Path, steps_before: int, steps: int
) -> None:
    for _ in range(steps_before):
        hosts.authority.rotate()
    copied = tmp_path / "c"
    shutil.copytree(hosts.ours / "c", copied)
    held = Keys(copied)
    hosts.authority.remove_host("c")
    assert hosts.authority.state.steps_to_forget == steps
    for step in range(steps):
        assert believed(held, hosts.keys("a")), f"after {step} steps"
        hosts.authority.rotate()
    assert not believed(held, hosts.keys("a"))
    assert held.secret == hosts.keys("a").secret, "no step renews it"


def believed(held: Keys, ours: Keys) -> set[str]:
    """What of the keys in somebody's hands one of our hosts still goes by."""
    found = set()
    certificate = x509.load_pem_x509_certificate(held.certificate.read_bytes())
    for authority in x509.load_pem_x509_certificates(ours.authorities.read_bytes()):
        with contextlib.suppress(ValueError):  # another one's name
            certificate.verify_directly_issued_by(authority)
            found.add("certificate")
    there = ours.curve.generations
    for each in held.curve.generations:
        if ours.curve.host_of(each.own_public):
            found.add("own key")
        if each.directory_secret in [other.directory_secret for other in there]:
            found.add("directory's key")
    return found


def test_keys_that_know_no_addresses_are_read_and_learn_them(hosts: Hosts) -> None:
    state = hosts.ours / "authority" / "state.json"
    older = json.loads(state.read_text())
    del older["addresses"]
    state.write_text(json.dumps(older))
    authority = Authority.read(hosts.ours)
    authority.add_host("a", address="fd00::1")
    assert certificate_problems(hosts.keys("a"), address="fd00::1") == []
    [problem] = certificate_problems(hosts.keys("b"), address="fd00::2")
    assert "mooncake keys add-host FOLDER b=fd00::2" in problem


def test_a_host_whose_folder_was_moved_away_is_removed(tmp_path: Path) -> None:
    folder, run = str(tmp_path / "keys"), CliRunner().invoke
    run(app, ["init", folder, "--host", "a", "--host", "b"])
    (tmp_path / "keys" / "b").rename(tmp_path / "b")
    assert run(app, ["remove-host", folder, "b"]).exit_code == 0
    assert "b: certificate" not in run(app, ["show", folder]).output


def test_nixl_is_closed_to_other_hosts_where_keys_are_asked_for_and_no_card_is_named(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUSTED_NICS, raising=False)
    monkeypatch.delenv(key_folder.VARIABLE, raising=False)
    assert not host_data_network().is_closed
    monkeypatch.setenv(key_folder.VARIABLE, str(hosts.ours / "a"))
    assert host_data_network().is_closed
    assert host_data_network().shared_devices == "lo"


@pytest.mark.parametrize("name", ["", "A", "../up", "a/b", "authority", "x" * 70])
def test_a_name_that_is_none_is_refused(hosts: Hosts, name: str) -> None:
    with pytest.raises(RequestInvalid, match="is not a valid host name"):
        hosts.authority.add_host(name)


def test_check_finds_what_others_would_not_believe(hosts: Hosts) -> None:
    month = datetime.timedelta(days=30)
    assert certificate_problems(hosts.keys("a"), month) == []
    hosts.authority.add_host("a", days=-2)
    assert "expired on" in certificate_problems(hosts.keys("a"))[0]
    hosts.authority.add_host("a", days=20)
    assert "expires on" in certificate_problems(hosts.keys("a"), month)[0]
    assert certificate_problems(hosts.keys("a")) == []
    (hosts.ours / "a" / "host.key").write_bytes((hosts.ours / "b" / "host.key").read_bytes())
    assert "is not its certificate's key" in certificate_problems(hosts.keys("a"))[0]
    (hosts.ours / "b" / "ca.pem").write_bytes((hosts.other / "a" / "ca.pem").read_bytes())
    assert "by none of the authorities" in certificate_problems(hosts.keys("b"))[0]
    assert CliRunner().invoke(app, ["check", str(hosts.ours)]).exit_code == 1


def test_what_was_begun_can_be_read_again(hosts: Hosts) -> None:
    assert Authority.read(hosts.ours).state == hosts.authority.state
