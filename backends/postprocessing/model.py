"""Triton entry point of postprocessing: token ids to text, the ensemble's last step.

The model has no state. A character may be divided between two messages of a stream, so a message
also has the tokens before it (`context_ids`). Detokenisation is in backends/text/text_stream.py.
"""

from backends.config_pbtxt import TokenizerConfig, checkpoint_folder, read_config
from backends.tensors import string_tensor
from backends.text.text_stream import new_text
from backends.text.tokenizer import Tokenizer
from backends.triton import triton_io


class TritonPythonModel:
    def initialize(self, args):
        try:
            model, raw, count = triton_io.parameters(args)
            # Several instances would deliver the messages of a stream out of order.
            config = read_config(TokenizerConfig, model, raw, count)
            folder = checkpoint_folder(config.checkpoint, triton_io.repository_of(args))
            self.tokenizer = Tokenizer.load(folder)
        except Exception as error:  # Catch all: Triton logs the message without a traceback
            raise triton_io.load_error(error) from None

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            inputs = triton_io.inputs_of(request)
            text = new_text(
                self.tokenizer,
                inputs["context_ids"].tolist(),
                inputs["output_ids"].tolist(),
                is_final=bool(inputs["finish_reason"][0]),
                cut_bytes=int(inputs["text_cut_bytes"][0]),
            )
            return triton_io.response({"text_output": string_tensor(text.encode())})
        except Exception as error:  # Catch all: one bad request must not fail others
            return triton_io.error_response(error)
