"""Triton entry point of preprocessing: text to token ids, the ensemble's first step.

The tokenizer is in backends/text/tokenizer.py. A text that cannot be tokenised fails with the same
message as in the model `conductor`.
"""

from backends.config_pbtxt import TokenizerConfig, checkpoint_folder, read_config
from backends.frontend.request import RequestLimits, parse_prompt
from backends.text.tokenizer import Tokenizer
from backends.triton import triton_io


class TritonPythonModel:
    def initialize(self, args):
        try:
            model, raw, _ = triton_io.parameters(args)
            config = read_config(TokenizerConfig, model, raw)
            folder = checkpoint_folder(config.checkpoint, triton_io.repository_of(args))
            self.tokenizer = Tokenizer.load(folder)
            # The conductor checks the length of the context.
            self.limits = RequestLimits(2**31, self.tokenizer.vocabulary_tokens)
        except Exception as error:  # Catch all: Triton logs the message without a traceback
            raise triton_io.load_error(error) from None

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            ids = parse_prompt(triton_io.inputs_of(request), self.tokenizer, self.limits)
            return triton_io.response({"input_ids": ids})
        except Exception as error:  # Catch all: one bad request must not fail others
            return triton_io.error_response(error)
