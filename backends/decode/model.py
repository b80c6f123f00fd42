"""Triton entry point of a decode worker. All of it is in backends/triton/worker_model.py."""

from backends.triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    role = "decode"
