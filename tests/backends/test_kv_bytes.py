"""The parameter `kv_bytes`: sizes, pages, refused budgets, and the old name `kv_pages`."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from backends.config_pbtxt import DecodeConfig, PrefillConfig, read_config
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import ConfigError
from backends.shipped import shipped_checkpoint
from mooncake_store.sizes import size_bytes

MIB = 2**20
DEMO_PAGE_BYTES = 4 * 2 * 2 * 32 * 64 * 4  # layers, K and V, heads, head_dim, tokens, float32


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256M", 256 * MIB), ("1.5G", 1536 * MIB), ("64KiB", 65536), (" 7 ", 7), ("1tb", 2**40)],
)
def test_a_size_is_parsed(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-1M", "1X", "1 0", "many"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write for example 512M"):
        size_bytes(text)
    with pytest.raises(ConfigError, match=r"kv_bytes is '.*'; expected a size such as 256M"):
        read_config(PrefillConfig, "p", {"kv_bytes": text})


@pytest.mark.parametrize(
    ("kv_bytes", "page_bytes", "pages"), [("256M", MIB, 256), ("2.9M", MIB, 2), ("10M", 3 * MIB, 3)]
)
def test_the_pages_are_the_whole_ones_that_fit(kv_bytes: str, page_bytes: int, pages: int) -> None:
    config = read_config(DecodeConfig, "d", {"kv_bytes": kv_bytes})
    assert config.pages_max(page_bytes) == pages


def test_a_budget_below_two_pages_is_refused_with_what_fits() -> None:
    config = read_config(PrefillConfig, "p", {"kv_bytes": "2.5M"})
    with pytest.raises(ConfigError) as said:
        config.pages_max(3 * MIB // 2)
    for words in ("kv_bytes is 2.5 MiB", "has 1.5 MiB and 2 pages", f"{3 * MIB} or more"):
        assert words in str(said.value)


def test_kv_pages_overrides_kv_bytes_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = read_config(PrefillConfig, "p", {"kv_pages": "7", "kv_bytes": "1G"})
    assert config.pages_max(MIB) == 7
    assert "p/config.pbtxt: kv_pages is deprecated and overrides kv_bytes" in caplog.text


def test_the_engine_has_the_pages_of_its_bytes() -> None:
    config = read_config(PrefillConfig, "p", {"kv_bytes": str(5 * DEMO_PAGE_BYTES + 1)})
    engine = TorchEngine.load(shipped_checkpoint(), config.pages_max, 64)
    assert engine.pages.pages_max == 5
    assert len(engine.kv_pool) == 5 * DEMO_PAGE_BYTES


def test_stages_with_unequal_layers_have_equal_pages() -> None:
    """The demo has four layers; of three stages the first has two."""
    config = read_config(PrefillConfig, "p", {"kv_bytes": str(3 * DEMO_PAGE_BYTES)})
    engines = [
        TorchEngine.load(shipped_checkpoint(), config.pages_max, 64, stage=stage, stages=3)
        for stage in range(3)
    ]
    assert [engine.pages.pages_max for engine in engines] == [6, 6, 6]


def test_more_bytes_than_the_machine_has_are_refused() -> None:
    config = read_config(PrefillConfig, "p", {"kv_bytes": "900T"})
    with pytest.raises(MemoryError, match="MiB are left; lower kv_bytes"):
        TorchEngine.load(shipped_checkpoint(), config.pages_max, 64)


def test_a_worker_imports_no_compiler_of_torch(tmp_path: Path) -> None:
    """torch._dynamo, torch._inductor and sympy take 68 MiB and seconds in each worker."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from backends.engine.interface import Work\n"
        "from backends.engine.torch.torch_engine import TorchEngine\n"
        "from backends.shipped import shipped_checkpoint\n"
        "for dtype in ('float32', 'bfloat16'):\n"
        "    engine = TorchEngine.load(shipped_checkpoint(), 4, 64, dtype)\n"
        "    engine.forward([Work(list(range(70)), 0, [0, 1])])\n"
        "    engine.forward([Work(list(range(50)), 70, [0, 1])])\n"
        "    engine.forward([Work([1], 120, [0, 1])])\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy')"
        " if name in sys.modules])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, program],
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "[]", done.stderr[-2000:]
