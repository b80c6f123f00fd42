"""Where versions 1.2.x have the connector API."""

from tensorrt_llm._fake.api import (
    HAS_NEW_API,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    RequestData,
    SchedulerOutput,
)

if HAS_NEW_API:
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)

__all__ = ["KvCacheConnectorScheduler", "KvCacheConnectorWorker", "RequestData", "SchedulerOutput"]
