"""Files of plain vLLM servers: those of killed servers are removed, and no others."""

from __future__ import annotations

import secrets

from backends.engine.plain_vllm.server_files import ServerFiles


def made() -> ServerFiles:
    files = ServerFiles(f"test-{secrets.token_hex(8)}")
    files.make_pool(4096)
    return files


def test_the_next_server_removes_the_files_of_a_killed_one_only() -> None:
    killed, living = made(), made()
    killed._lock.close()  # as the system does when a process ends
    later = made()
    try:
        assert not killed.pool.exists() and not killed.folder.exists()
        assert living.pool.stat().st_size == 4096 and living.folder.exists()
    finally:
        living.remove()
        later.remove()
    assert not any(each.pool.exists() or each.folder.exists() for each in (living, later))


def test_processes_of_one_server_share_its_pool() -> None:
    name = f"test-{secrets.token_hex(8)}"
    first, second = ServerFiles(name), ServerFiles(name)
    first.make_pool(4096)
    first.pool.write_bytes(b"x" * 4096)
    second.make_pool(4096)
    assert second.pool.read_bytes() == b"x" * 4096
    second.remove()
    first.remove()
