"""The connector for a plain vLLM server that shares prefixes with others through the store.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "MooncakeTritonConnector",
        "kv_connector_module_path": "backends.engine.plain_vllm.connector", "kv_role": "kv_both"}'

There is no worker. The instance in vLLM's scheduler looks prefixes up and puts saved blocks
(prefixes.py). All else is as with a worker (../vllm/connector.py). The scheduler and the ranks
share files (server_files.py).

Requests with a LoRA adapter, with images, or with embeddings instead of tokens are computed, since
their KV does not depend on the tokens alone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import typer

from backends.engine.connected import messages as m
from backends.engine.connected.channel import ConnectorHost
from backends.engine.connected.host_memory import map_pool
from backends.engine.plain_vllm.prefixes import SharedPrefixes, SharingSettings
from backends.engine.plain_vllm.server_files import ServerFiles
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
        refuse_what_does_not_work(vllm_config)
        transfer = vllm_config.kv_transfer_config
        transfer.kv_load_failure_policy = "recompute"  # a failed load costs time only
        given = SharingSettings.of(transfer.kv_connector_extra_config)
        self._kv = described(vllm_config)
        self._settings = given.of_pages(self._kv.page_tokens)
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._layout = layout_of(self._kv, tp_size, self._settings.block_tokens)
        self._files = ServerFiles(str(transfer.engine_id))
        self._prefixes: SharedPrefixes | None = None
        self._client: StoreClient | None = None
        self._host: ConnectorHost | None = None
        try:
            super().__init__(vllm_config, role, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                self._begin(vllm_config)
        except BaseException:
            self._files.remove()
            raise

    def _find_site(self) -> m.Site:
        block_bytes = self._layout.block_bytes
        self._files.make_pool(max(1, self._settings.pool_bytes // block_bytes) * block_bytes)
        return m.Site(
            f"ipc://{self._files.folder}/kv",
            str(self._files.pool),
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
        except typer.BadParameter:
            raise ValueError(
                "MooncakeTritonConnector finds no store: start one (mooncake store serve), or set "
                "`directory` in kv_connector_extra_config"
            ) from None
        self._client = StoreClient(directory, settings.node_id, tenant=settings.tenant)
        self._client.register(pool)
        self._prefixes = SharedPrefixes(
            settings, self._client, form.fingerprint, pool, site.block_bytes
        )
        self._host = ConnectorHost(site.channel, self._prefixes)
        self._prefixes.connect(self._host)
        ranks = self._host.wait_ready(READY_S_MAX)
        self._files.pool.unlink()  # all have mapped it
        log.warning(
            "KV is shared by node %s: blocks of %d tokens, staging pool of %d blocks, "
            "fingerprint %s",
            *(self._client.node_id or "of another host", site.block_tokens),
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

    def reset_cache(self) -> bool:
        """vLLM asks for this when its weights may have changed."""
        if self._prefixes is not None:
            self._prefixes.reset()
        return True

    def shutdown(self) -> None:
        super().shutdown()
        for part in (self._prefixes, self._host, self._client):
            if part is not None:
                part.close()
        self._files.remove()


def refuse_what_does_not_work(config: Any) -> None:
    """Raises ValueError with all of it."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    allowed = {
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "decode_context_parallel_size": (parallel.decode_context_parallel_size, 1),
        "prefill_context_parallel_size": (parallel.prefill_context_parallel_size, 1),
        "speculative_config": (config.speculative_config, None),
        "enable_sleep_mode": (config.model_config.enable_sleep_mode, False),
        "kv_role": (transfer.kv_role, "kv_both"),
    }
    found = [f"{name} must be {only!r}" for name, (value, only) in allowed.items() if value != only]
    if found:
        raise ValueError(f"MooncakeTritonConnector: {'; '.join(found)}")


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
