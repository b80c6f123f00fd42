"""A model.py that a test puts into the folder of backends that its server runs from: a worker whose
engine stands still, or fails, while a file of its name says so.

`{folder}`, where those files are, is filled in by the test. Nothing of this is in the product.
"""

import time
from pathlib import Path

from backends.engine.torch.torch_engine import TorchEngine, TorchLayerPass
from backends.triton.worker_model import WorkerModel
from backends.workers import step_times

step_times.HUNG_S_MIN = 6.0  # the test has not half a minute; more than GAP_S_MAX
forward, compute = TorchEngine.forward, TorchLayerPass.compute


class TritonPythonModel(WorkerModel):
    role = Path(__file__).parent.name

    def initialize(self, args):
        word = Path("{folder}") / args["model_name"]

        def says(what):
            return word.exists() and word.read_text() == what

        def look(starts):
            while says("hang"):
                time.sleep(0.05)  # poll
            if says("fail") and any(starts):  # not the first chunk
                raise RuntimeError("the test wants it so")

        def forward_or_not(engine, works, *given):
            look(work.start for work in works)
            return forward(engine, works, *given)

        def compute_or_not(passing, layer, start, tokens):
            look([start])
            return compute(passing, layer, start, tokens)

        TorchEngine.forward, TorchLayerPass.compute = forward_or_not, compute_or_not
        super().initialize(args)
