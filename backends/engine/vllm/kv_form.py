"""Layout and fingerprint of vLLM's KV, from its description and the files of the checkpoint.

A worker on vLLM and a plain vLLM server with our connector call the same function. So both use the
same blocks, if their vLLM describes its KV in the same way.

Not here: the description (description.py), the weights (../checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from backends.engine.checkpoint import Checkpoint
from backends.engine.connected.kv_identity import KvIdentity, canonical
from backends.engine.vllm.messages import DescribedKv
from backends.engine.vllm.settings import options_that_reach_kv
from backends.errors import ConfigError
from mooncake_store.layout import KvLayout, fingerprint


class KvForm(NamedTuple):
    layout: KvLayout
    model_id: str
    weights_id: str
    tp_shape: str

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.model_id, self.weights_id, self.layout, self.tp_shape)


def layout_of(kv: DescribedKv, tp_size: int, block_tokens: int) -> KvLayout:
    """The layout of a store block. Raises ConfigError."""
    if block_tokens < 1 or block_tokens % kv.page_tokens:
        raise ConfigError(
            f"vLLM has pages of {kv.page_tokens} tokens for this model and platform; "
            f"block_tokens ({block_tokens}) must be a multiple of that"
        )
    heads = max(kv.kv_heads, tp_size) if not kv.is_latent else 1
    factor = 1 if kv.is_latent else 2
    return KvLayout(kv.layers, heads, kv.head_dim, kv.kv_dtype, block_tokens, kv_factor=factor)


def kv_form(
    kv: DescribedKv, tp_size: int, block_tokens: int, folder: Path, options: Mapping[str, Any]
) -> KvForm:
    """`folder`: the checkpoint; `options`: vllm_options. Raises ConfigError, CheckpointError."""
    layout = layout_of(kv, tp_size, block_tokens)
    reaching = options_that_reach_kv(options)
    return KvForm(
        layout,
        f"{kv.architecture}-{kv.layers}x{kv.hidden}-v{kv.vocabulary_tokens}",
        Checkpoint.open(folder).weights_id(KvIdentity.of_folder(folder)),
        kv.pages_id + (f"-{canonical(reaching)}" if reaching else ""),
    )
