"""`mooncake tenants` as people call it: keys come and go, and the file never has one."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.tenants import ApiKeys, tenants_file
from backends.tenants.command import app
from backends.tenants.tenants_file import TenantsFile, read, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    return result.exit_code, result.output


def added(path: Path, *arguments: object) -> str:
    """The key that was printed."""
    status, output = run("add", path, *arguments)
    assert status == 0, output
    return output.strip().splitlines()[-1]


def test_a_key_that_was_made_opens_and_is_in_no_file(path: Path) -> None:
    key = added(path, "acme", "--note", "billing", "--requests-per-minute", 60)
    other = added(path, "acme", "--priority", 2)
    tenant = ApiKeys(path).tenant_of(key)
    assert tenant is not None and tenant == ApiKeys(path).tenant_of(other)
    assert (tenant.name, tenant.salt, tenant.priority) == ("acme", "acme", 2)
    assert tenant.limits.requests_per_minute == 60, "what is not said stays"
    assert key not in path.read_text() and path.stat().st_mode & 0o077 == 0
    said = run("add", path, "acme", "--no-key", "--requests-per-minute", 0)[1]
    assert said.startswith("acme: ") and "mk-" not in said and "requests a minute" not in said
    assert read(path).tenants["acme"].requests_per_minute is None and len(read(path).keys) == 2


def test_a_tenant_is_an_operator_until_it_is_told_otherwise(path: Path) -> None:
    key = added(path, "ops", "--operator")
    tenant = ApiKeys(path).tenant_of(key)
    assert tenant is not None and tenant.is_operator
    assert "ops: operator" in run("list", path)[1]
    run("add", path, "ops", "--no-key", "--no-operator")
    tenant = ApiKeys(path).tenant_of(key)
    assert tenant is not None and not tenant.is_operator


def test_what_is_listed_says_who_may_what_and_shows_neither_keys_nor_salts(path: Path) -> None:
    key = added(path, "acme", "--note", "billing", "--tokens-per-minute", 5000, "--salt", "s-e-c")
    status, output = run("list", path)
    assert status == 0 and "acme: at most 5000 tokens a minute, a salt is set" in output
    assert "billing" in output and key not in output and "s-e-c" not in output
    assert "default: shares cached KV with requests without a tenant" in output
    assert "at Triton's own ports: served" in output


def test_a_revoked_key_opens_nothing_and_the_others_stay(path: Path) -> None:
    first, second, third = (added(path, name) for name in ("acme", "acme", "umbrella"))
    keys = ApiKeys(path)
    shown = re.findall(r"key (\w+)", run("list", path)[1])
    assert len(shown) == 3
    assert run("revoke", path, shown[0])[0] == 0
    assert keys.tenant_of(first) is None and keys.tenant_of(second) is not None
    assert run("revoke", path, second)[0] == 0, "whoever has only the key may say the key"
    assert keys.tenant_of(second) is None and keys.tenant("acme") is not None
    assert run("revoke", path, "umbrella")[0] == 0
    assert keys.tenant_of(third) is None and keys.tenant("umbrella") is None


def test_an_edit_waits_for_another_one_so_that_none_is_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[bool] = []

    def look(where: Path, content: TenantsFile) -> None:
        descriptor = os.open(where.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone.append(False)
        except BlockingIOError:
            alone.append(True)
        finally:
            os.close(descriptor)
        write(where, content)

    monkeypatch.setattr(tenants_file, "write", look)
    key = added(path, "acme")
    assert run("revoke", path, key)[0] == 0 and alone == [True, True]


def test_a_group_that_may_read_the_keys_may_do_so_after_an_edit(path: Path) -> None:
    added(path, "acme")
    path.chmod(0o640)
    added(path, "acme")
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_names_nothing_or_too_much_revokes_nothing(path: Path) -> None:
    added(path, "acme")
    before = path.read_bytes()
    for said in ("nobody", "", "0", read(path).keys[0].sha256[:3]):
        status, output = run("revoke", path, said)
        assert status == 1 and "no tenant and no key" in output, said
    assert path.read_bytes() == before
    assert run("list", path.with_name("none.json"))[0] == 1
    status, output = run("add", path, "a b")
    assert status == 1 and "a name has 1 to 64" in output and path.read_bytes() == before
    path.chmod(0o644)
    status, output = run("add", path, "acme")
    assert status == 1 and "chmod g-w,o=" in output


def test_a_key_that_is_said_to_be_revoked_is_not_shown(path: Path) -> None:
    key = added(path, "acme")
    status, output = run("revoke", path, "mk-mistyped" + key)
    assert status == 1 and key not in output
    key_id = read(path).keys[0].key_id
    status, output = run("revoke", path, key)
    assert status == 0 and key not in output and f"acme ({key_id})" in output
