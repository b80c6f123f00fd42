"""An engine that outlives its driver, when a worker changes its role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from backends.config_pbtxt import DecodeConfig, PrefillConfig
from backends.workers.connected.decode import ConnectedDecode
from backends.workers.connected.driver import EngineUse
from backends.workers.connected.prefill import ConnectedPrefill
from mooncake_store.layout import KvLayout, LayerRange, PageLayout


def test_later_drivers_of_an_engine_use_the_segments_that_its_ranks_have_mapped() -> None:
    engine: Any = SimpleNamespace(
        host=None, is_connected=True, is_native=False, hardware="", kv_pool=None
    )
    use = EngineUse(lambda listener, on_step: engine)
    pages = PageLayout(KvLayout(1, 1, 8, "float32", 16), LayerRange(0, 1))
    store = cast(Any, SimpleNamespace())
    found = []
    makers: list[Any] = [
        lambda: ConnectedPrefill(PrefillConfig(), use),
        lambda: ConnectedDecode(DecodeConfig(), use),
    ]
    for make in makers:
        driver = make()
        driver.make_loader(store, pages, 1.0)
        assert use.driver is driver
        found.append(driver._regions)
    assert found[0] is found[1] is not None
