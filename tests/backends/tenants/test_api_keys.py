"""Keys to tenants: found, refused, revoked while others are served."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from backends.tenants import ApiKeys, TenantsInvalid, api_keys
from backends.tenants.api_keys import make_key, sha256_of
from backends.tenants.tenants_file import KeyEntry, TenantEntry, TenantsFile, read, write

A, B = "mk-of-a", "mk-of-b"


def content(**keys: str) -> dict[str, Any]:
    """A file in which each tenant has this key."""
    return {
        "tenants": {tenant: {} for tenant in keys},
        "keys": [{"sha256": sha256_of(key), "tenant": tenant} for tenant, key in keys.items()],
    }


def written(path: Path, given: dict[str, Any]) -> Path:
    """As a careful editor does it: a new file in the place of the old one."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(given))
    beside.chmod(0o600)
    return beside.rename(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "keys.json", content(a=A, b=B))


def test_a_key_names_its_tenant_and_nothing_else_names_one(path: Path) -> None:
    keys = ApiKeys(path)
    found = keys.tenant_of(A)
    assert found is not None and (found.name, found.salt) == ("a", "a")
    for wrong in ("", "mk-of-c", A[:-1], A + " ", A.upper(), sha256_of(A), "x" * 10_000, "\ud800"):
        assert keys.tenant_of(wrong) is None, wrong


def test_a_key_that_is_no_text_of_utf_8_is_nobodys(path: Path) -> None:
    """Whoever makes a ? of it makes two keys one."""
    written(path, content(a="mk-?"))
    assert ApiKeys(path).tenant_of("mk-?") is not None
    assert ApiKeys(path).tenant_of("mk-\ud800") is None


def test_every_found_hash_is_compared_in_constant_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    keys = ApiKeys(path)
    assert keys.tenant_of(A) and not keys.tenant_of("mk-wrong")
    assert compared == [(sha256_of(A), sha256_of(A)), (sha256_of("mk-wrong"), "")]


def test_what_a_key_is_looked_up_by_differs_from_process_to_process(path: Path) -> None:
    one, other = ApiKeys(path)._now().by_digest, ApiKeys(path)._now().by_digest
    assert len(one) == 2 and not one.keys() & other.keys()
    assert not any(sha256_of(A)[:8] in digest.hex() for digest in one)


def test_an_edit_counts_at_the_next_request_and_a_key_that_is_gone_opens_nothing(
    path: Path,
) -> None:
    keys = ApiKeys(path)
    assert keys.tenant_of(A) is not None
    written(path, content(b=B, c="mk-new"))
    assert keys.tenant_of(A) is None and keys.tenant("a") is None
    assert [keys.tenant_of(key).name for key in (B, "mk-new")] == ["b", "c"]  # type: ignore[union-attr]


@pytest.mark.parametrize("damage", ["{", "", '{"tenants": {}, "keys": [{"sha256": "0"}]}', "gone"])
def test_a_file_that_cannot_be_read_leaves_the_keys_of_before(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(path)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert keys.tenant_of(A) is not None and keys.tenant_of("mk-wrong") is None
    assert "the old ones stay in use" in caplog.text
    written(path, content(c="mk-new"))
    assert keys.tenant_of(A) is None and keys.tenant_of("mk-new") is not None


def test_no_key_and_no_salt_is_in_what_is_logged_of_a_mistake(path: Path) -> None:
    given = content(a=A) | {"keyless": "perhaps"}
    given["tenants"]["a"] = {"salt": "secret-salt", "requests_per_minute": 0}
    with pytest.raises(TenantsInvalid) as refused:
        ApiKeys(written(path, given))
    said = str(refused.value)
    assert "keyless" in said and "requests_per_minute is 0" in said, "every mistake at once"
    assert "secret-salt" not in said and sha256_of(A) not in said


def test_a_file_that_others_may_read_is_refused(path: Path) -> None:
    path.chmod(0o604)
    with pytest.raises(TenantsInvalid, match="chmod g-w,o="):
        ApiKeys(path)
    path.chmod(0o640)
    assert ApiKeys(path).tenant_of(A) is not None


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"tenants": {"a b": {}}}, "a name has 1 to 64"),
    ({"tenants": {"": {}}}, "a name has 1 to 64"),
    ({"tenants": {"a\n": {}}}, "a name has 1 to 64"),
    ({"tenants": {"a": {"salt": "x" * 257}}}, "longer than 256"),
    ({"tenants": {"a": {"salt": "x\0"}}}, "its salt has"),
    ({"tenants": {"default": {"salt": "x"}}}, "remove its salt"),
    ({"tenants": {"a": {"priority": 2**31}}}, "priority is"),
    ({"tenants": {"a": {"tokens_per_minute": -1}}}, "tokens_per_minute is -1"),
    ({"tenants": {"a": {"requests_in_flight_max": 0}}}, "requests_in_flight_max is 0"),
    ({"tenants": {"a": {"requests_per_hour": 5}}}, "requests_per_hour"),
    ({"keys": [{"sha256": "0" * 64, "tenant": "nobody"}]}, "not in tenants"),
    ({"tenants": {"a": {}}, "keys": [{"sha256": "0" * 63, "tenant": "a"}]}, "64 hex digits"),
    ({"tenants": {"a": {}}, "keys": [{"sha256": "F" * 64, "tenant": "a"}]}, "64 hex digits"),
    ({"tenants": {"a": {}}, "keys": [{"sha256": "0" * 64, "tenant": "a"}] * 2}, "the same key"),
    ({"tenants": []}, "Expected `object`"),
]


@pytest.mark.parametrize(("given", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_in_the_file_is_named(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(TenantsInvalid, match=said):
        ApiKeys(written(tmp_path / "keys.json", given))


def test_the_default_tenant_is_always_there_and_shares(path: Path) -> None:
    found = ApiKeys(path).tenant("default")
    assert found is not None and found.salt == "" and found.limits.requests_per_minute is None
    written(path, {"tenants": {"default": {"requests_per_minute": 5}}})
    found = ApiKeys(path).tenant("default")
    assert found is not None and (found.salt, found.limits.requests_per_minute) == ("", 5)


def test_keys_come_from_the_environment_as_a_path_or_as_the_text_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(api_keys.VARIABLE, raising=False)
    assert ApiKeys.of_process() is None
    for given in (str(path), json.dumps(content(a=A))):
        monkeypatch.setenv(api_keys.VARIABLE, given)
        keys = ApiKeys.of_process()
        assert keys is not None and keys.tenant_of(A) is not None and keys.tenant_of("x") is None
    monkeypatch.setenv(api_keys.VARIABLE, '{"keys": 5}')
    with pytest.raises(TenantsInvalid, match=api_keys.VARIABLE):
        ApiKeys.of_process()


def test_a_launch_names_the_file_so_that_processes_elsewhere_find_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    option = api_keys.environment(Path(path.name), {api_keys.VARIABLE: "other.json"})
    assert option == {api_keys.VARIABLE: str(path)}
    assert api_keys.environment(None, {api_keys.VARIABLE: path.name}) == option
    assert api_keys.environment(None, {}) == {} and api_keys.problems(None, {}) == []
    [said] = api_keys.problems(Path("no.json"), {})
    assert "no.json" in said and "mooncake tenants add" in said


def test_made_keys_are_long_and_differ() -> None:
    made = {make_key() for _ in range(100)}
    assert len(made) == 100 and all(len(key) >= 43 and key.startswith("mk-") for key in made)


def test_what_is_written_is_private_whole_and_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    file = TenantsFile(
        {"a": TenantEntry(salt="s", priority=-1, tokens_per_minute=9)},
        [KeyEntry(sha256_of(A), "a", "note")],
        "refused",
    )
    write(path, file)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path) == file
    with pytest.raises(TenantsInvalid):
        write(path, TenantsFile(keys=[KeyEntry("x", "a")]))
    assert read(path) == file and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_exchanged_behind_a_link_is_read_again(path: Path, tmp_path: Path) -> None:
    """As Kubernetes does it with a mounted secret."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, tenants in zip(folders, (content(a=A), content(b=B)), strict=True):
        folder.mkdir()
        written(folder / "keys.json", tenants)
    link = tmp_path / "now"
    link.symlink_to(folders[0])
    named = api_keys.environment(link / "keys.json", {})[api_keys.VARIABLE]
    keys = ApiKeys.of(named)
    assert keys is not None and keys.tenant_of(A) is not None
    (tmp_path / "next").symlink_to(folders[1])
    (tmp_path / "next").rename(link)
    assert keys.tenant_of(A) is None and keys.tenant_of(B) is not None


def test_a_file_with_a_mistake_is_read_once_and_not_at_each_request(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, read_sizes = ApiKeys(path), []
    parse = api_keys.tenants_file.parse

    def counted(raw: bytes, what: str) -> TenantsFile:
        read_sizes.append(len(raw))
        return parse(raw, what)

    monkeypatch.setattr(api_keys.tenants_file, "parse", counted)
    written(path, {"tenants": {"a": {"priority": "high"}}})
    assert all(keys.tenant_of(A) is not None for _ in range(50)) and len(read_sizes) == 1
    written(path, content(b=B))
    assert keys.tenant_of(A) is None and keys.tenant_of(B) is not None and len(read_sizes) == 2
