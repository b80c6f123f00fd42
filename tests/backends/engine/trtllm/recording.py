"""A connector that answers what a test tells it and notes every call (a plan for the whole module).

Loaded by its name, as TensorRT-LLM does it: `MooncakeConnectorScheduler` and `...Worker` are the
names that connected.py asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backends.engine.trtllm.connector import SchedulerBase, WorkerBase


@dataclass
class Plan:
    matched: tuple[int, bool] = (0, False)
    is_saving: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def count(self, name: str) -> int:
        return sum(each == name for each, _ in self.calls)

    def of(self, name: str) -> list[Any]:
        return [what for each, what in self.calls if each == name]


PLAN = Plan()


def start_again(**answers: Any) -> Plan:
    PLAN.__init__(**answers)  # type: ignore[misc]
    return PLAN


def note(name: str, what: Any = None) -> None:
    PLAN.calls.append((name, what))


class MooncakeConnectorScheduler(SchedulerBase):
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        note("get_num_new_matched_tokens", computed)
        return PLAN.matched

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        note("update_state_after_alloc", block_ids)

    def build_connector_meta(self, output: Any) -> int:
        note("build_connector_meta", output)
        return 1

    def request_finished(self, request: Any, block_ids: list[int]) -> bool:
        note("request_finished", block_ids)
        return PLAN.is_saving


class MooncakeConnectorWorker(WorkerBase):
    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        note("register_kv_caches", tuple(kv_cache_tensor.shape))

    def start_load_kv(self, stream: Any) -> None:
        note("start_load_kv")

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        note("wait_for_layer_load", layer_idx)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        note("save_kv_layer", layer_idx)

    def wait_for_save(self, stream: Any) -> None:
        note("wait_for_save")

    def get_finished(self, finished: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        note("get_finished", (finished, loading))
        return finished, loading
