"""The connector API of the release that FAKE_TRTLLM_API names."""

from __future__ import annotations

import os
from typing import Any

from backends.doctor.contract.recorded import read
from backends.engine.trtllm.releases import kv_manager_of
from tensorrt_llm._fake.api_source import api_source

RELEASE = os.environ.get("FAKE_TRTLLM_API", "1.4")
VERSION = {"1.2": "1.2.1", "1.3": "1.3.0rc14", "1.4": "1.4.0rc2"}[RELEASE]
HAS_NEW_API = RELEASE != "1.2"
MANAGER = kv_manager_of(VERSION)
CONTRACT = read(MANAGER)

RequestData: Any
SchedulerOutput: Any
KvCacheConnectorWorker: Any
KvCacheConnectorScheduler: Any
exec(api_source(CONTRACT, "/kv_cache_connector.py"))
