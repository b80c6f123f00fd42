"""A model.py that a test puts into the folder of backends that its server runs from: a worker whose
engine stands still, or fails, while a file of its name says so.

`{folder}`, where those files are, is filled in by the test. Nothing of this is in the product.
"""

import time
from pathlib import Path

from backends.engine.torch.torch_engine import TorchEngine
from backends.triton.worker_model import WorkerModel
from backends.workers import step_times

step_times.HUNG_S_MIN = 6.0  # the test has not half a minute; more than GAP_S_MAX
forward = TorchEngine.forward


class TritonPythonModel(WorkerModel):
    role = Path(__file__).parent.name

    def initialize(self, args):
        word = Path("{folder}") / args["model_name"]

        def says(what):
            return word.exists() and word.read_text() == what

        def instead(engine, works, *given):
            while says("hang"):
                time.sleep(0.05)  # poll
            if says("fail") and any(work.start for work in works):  # not the first chunk
                raise RuntimeError("the test wants it so")
            return forward(engine, works, *given)

        TorchEngine.forward = instead
        super().initialize(args)
