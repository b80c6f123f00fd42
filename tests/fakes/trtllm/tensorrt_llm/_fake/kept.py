"""The bodies of the connector API's own methods, by class. api_source.py writes the classes."""

from __future__ import annotations

import ctypes
from typing import Any


class KvCacheConnectorWorker:
    def __init__(self: Any, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata = None

    def bind_connector_meta(self: Any, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self: Any) -> object:
        return self._metadata

    def _clear_connector_meta(self: Any) -> None:
        self._metadata = None

    def register_forward_pass_callable(self: Any) -> None:
        return None

    def register_kv_cache_layout(self: Any, layout: Any) -> None:
        """One tensor of bytes, [pages, layers, K and V, bytes], if that describes all."""
        import torch

        (group,) = layout.groups
        (region,) = group.regions
        layers = len(group.layer_ids)
        shape = (layers, len(region.buffers) // layers, -1)
        self.register_kv_caches(region.as_tensor(torch.uint8).unflatten(1, shape))


class KvCacheConnectorScheduler:
    def __init__(self: Any, llm_args: Any) -> None:
        self._llm_args = llm_args

    def wait_for_initialization(self: Any) -> None:
        return None

    def update_state_after_alloc_by_layer_group(
        self: Any, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        (block_ids,) = block_ids_by_layer_group
        self.update_state_after_alloc(request, block_ids)

    def request_finished_by_layer_group(
        self: Any, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        (block_ids,) = cache_block_ids_by_layer_group
        return bool(self.request_finished(request, block_ids))


class KvCacheRegion:
    def as_tensor(self: Any, dtype: Any) -> Any:
        """[num_slots, size], a row for each page."""
        import torch

        assert dtype is torch.uint8, dtype
        size_bytes = (self.num_slots - 1) * self.stride + self.size
        memory = (ctypes.c_uint8 * size_bytes).from_address(self.base)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.as_strided((self.num_slots, self.size), (self.stride, 1))
