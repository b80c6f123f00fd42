"""Triton entry point of a prefill worker. The code is in backends/triton/worker_model.py."""

from backends.triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    role = "prefill"
