"""The connector for a plain vLLM server that shares prefixes with others through the store.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "MooncakeTritonConnector",
        "kv_connector_module_path": "backends.engine.plain_vllm.connector", "kv_role": "kv_both"}'

There is no worker. The instance in vLLM's scheduler looks prefixes up and puts saved blocks
(prefixes.py). All else is as with a worker (../vllm/connector.py). The scheduler and the ranks
agree on their channel and staging pool by the id that vLLM gives to the engine. The pool's file is
removed when all ranks have mapped it, so nothing is left if vLLM is killed.

Requests with a LoRA adapter, with images, or with embeddings instead of tokens are computed, since
their KV does not depend on the tokens alone.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import typer

from backends.engine.connected import messages as m
from backends.engine.connected.channel import ConnectorHost
from backends.engine.connected.host_memory import SHM, make_pool, map_pool
from backends.engine.plain_vllm.prefixes import SharedPrefixes, SharingSettings
from backends.engine.vllm.connector import KVConnectorRole, MooncakeConnector
from backends.engine.vllm.description import described
from backends.engine.vllm.kv_form import kv_form, layout_of
from mooncake_store.cli.arguments import find_directory
from mooncake_store.client.client import StoreClient

log = logging.getLogger(__name__)
READY_S_MAX = 60.0  # the ranks have registered their pages before the scheduler begins


class MooncakeTritonConnector(MooncakeConnector):
    has_worker = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("MooncakeTritonConnector is not implemented for pipeline stages")
        self._settings = SharingSettings.of(transfer.kv_connector_extra_config)
        self._engine_id = str(transfer.engine_id)
        self._kv = described(vllm_config)
        tp_size, block_tokens = parallel.tensor_parallel_size, self._settings.block_tokens
        self._layout = layout_of(self._kv, tp_size, block_tokens)
        transfer.kv_load_failure_policy = "recompute"  # the store only saves time
        super().__init__(vllm_config, role, kv_cache_config)
        self._prefixes: SharedPrefixes | None = None
        if role == KVConnectorRole.SCHEDULER:
            with self._saying_why():
                self._begin(vllm_config)

    def _find_site(self) -> m.Site:
        folder = Path(tempfile.gettempdir()) / f"mooncake-vllm-{self._engine_id}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        block_bytes = self._layout.block_bytes
        pages = max(1, self._settings.pool_bytes // block_bytes)
        pool = SHM / f"mooncake-vllm-{self._engine_id}"
        make_pool(pool, pages * block_bytes)
        return m.Site(
            f"ipc://{folder}/kv",
            str(pool),
            self._layout.block_tokens,
            block_bytes,
            aside_bytes_min=1,
            is_alike=self._layout.kv_factor == 1,
        )

    def _begin(self, config: Any) -> None:
        site, settings = self._site, self._settings
        pool = map_pool(site.pool_path, site.block_bytes)
        folder = checkpoint_folder(config.model_config)
        form = kv_form(self._kv, self._tp_size, site.block_tokens, folder, {})
        try:
            directory = find_directory(settings.directory)
        except typer.BadParameter as error:
            raise ValueError(f"MooncakeTritonConnector: {error}") from None
        client = StoreClient(directory, settings.node_id, tenant=settings.tenant)
        client.register(pool)
        prefixes = SharedPrefixes(
            settings,
            client,
            form.fingerprint,
            pool,
            site.block_bytes,
            lambda stage: self._scheduler.add_checked(stage),
        )
        self._client, self._prefixes = client, prefixes
        self._host = ConnectorHost(site.channel, prefixes)
        prefixes.connect(self._host)
        ranks = self._host.wait_ready(READY_S_MAX)
        Path(site.pool_path).unlink()
        log.warning(
            "KV is shared by %s: blocks of %d tokens, staging pool of %d blocks, fingerprint %s",
            *(client.node_id or "other hosts' nodes", site.block_tokens),
            *(ranks[0].pool_pages, form.fingerprint),
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._saying_why():
            assert self._prefixes is not None, "vLLM asks in the scheduler only"
            if not is_of_tokens(request):
                return 0, False
            name, salt = request.request_id, request.cache_salt or ""
            tokens = request.prompt_token_ids
            is_staged = self._prefixes.ask(name, tokens, salt, num_computed_tokens)
            if is_staged is None:
                return None, False
            if not is_staged:
                return 0, False
            found = self._scheduler.match(request, num_computed_tokens, name)
            return found, found > 0

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        found = super().request_finished(request, block_ids)
        if self._prefixes is not None:
            self._prefixes.finished(request.request_id)
        return found

    def shutdown(self) -> None:
        super().shutdown()
        if self._prefixes is not None:
            self._prefixes.close()
            self._host.close()
            self._client.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def is_of_tokens(request: Any) -> bool:
    """True if the KV of the prompt depends on its tokens and salt alone."""
    return not (
        request.mm_features
        or request.lora_request
        or request.prompt_embeds is not None
        or request.prompt_token_ids is None
    )


def checkpoint_folder(model: Any) -> Path:
    """The files of vLLM's model: a folder, or a name whose files vLLM has downloaded."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
