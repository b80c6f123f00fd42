"""The installed vLLM is one that our connector supports, and has what our half imports."""

from __future__ import annotations

from importlib import import_module

import vllm
from packaging.specifiers import SpecifierSet

from backends.engine.interpreter import NEEDS, VLLM_SUPPORTED


def test_the_version_is_supported() -> None:
    assert SpecifierSet(VLLM_SUPPORTED).contains(vllm.__version__, prereleases=True)


def test_every_module_that_our_half_needs_can_be_imported() -> None:
    for name in NEEDS:
        import_module(name)
    import_module("backends.engine.vllm.connector")
    import_module("backends.engine.vllm.process")
