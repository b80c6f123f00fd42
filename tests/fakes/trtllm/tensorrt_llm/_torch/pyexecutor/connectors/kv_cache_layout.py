"""The layout of KV cache manager V2; 1.4 and newer."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._fake.api import CONTRACT
from tensorrt_llm._fake.api_source import api_source

KvCacheLayout: Any
KvCacheLayerGroupLayout: Any
KvCacheRegion: Any
KvCacheBufferRef: Any
exec(api_source(CONTRACT, "/kv_cache_layout.py"))
