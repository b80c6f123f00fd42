"""Penalties for tokens of an answer that vLLM gets as the end of a prompt.

A decode worker sends vLLM the prompt and the tokens that the answer already has: the *given*
tokens. vLLM's repetition penalty covers them, because it covers prompts. Its frequency and presence
penalties cover only tokens that vLLM itself has generated. The rest is computed here:

* frequency_penalty x (count among the given tokens);
* presence_penalty, for a given token that vLLM has not generated again. For a generated token, vLLM
  subtracts presence_penalty by itself.

Pure. Not here: the classes that vLLM calls (logits_processors.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# Key of SamplingParams.extra_args: number of given tokens, if the request has penalties or a guide.
GIVEN = "mooncake_given"


def given_tokens(params: Any) -> int:
    """The number of given tokens that these vLLM SamplingParams name; 0: none."""
    extra: Mapping[str, Any] | None = getattr(params, "extra_args", None)
    return int(extra.get(GIVEN, 0)) if extra else 0


def counts_generated(params: Any) -> bool:
    """True if a penalty of these vLLM SamplingParams covers generated tokens only."""
    return bool(params.frequency_penalty or params.presence_penalty)


class GivenPenalty:
    """The amounts to subtract from the logits of one request, for each given token id."""

    def __init__(
        self, given_ids: Sequence[int], output_ids: Sequence[int], frequency: float, presence: float
    ) -> None:
        """`output_ids`: the tokens that vLLM has generated; vLLM appends to this list. A token that
        is not known yet is -1, and vLLM replaces it before it calls the processor."""
        counts = Counter(given_ids)
        self.token_ids = sorted(counts)
        self.subtracted = [frequency * counts[each] + presence for each in self.token_ids]
        self._presence = presence
        self._output_ids = output_ids
        self._read = 0  # tokens of `_output_ids` that `repeated` has read
        # Given tokens that are not among the read tokens -> index in `token_ids`
        self._unrepeated = {each: index for index, each in enumerate(self.token_ids)}

    def repeated(self) -> list[int]:
        """Indices in `token_ids` of the tokens that vLLM has generated since the last call, for the
        first time. Their presence_penalty is removed from `subtracted`."""
        found = []
        while self._read < len(self._output_ids) and self._output_ids[self._read] >= 0:
            index = self._unrepeated.pop(self._output_ids[self._read], None)
            self._read += 1
            if index is not None:
                self.subtracted[index] -= self._presence
                found.append(index)
        return found


def before_repetition(logits: Any, subtracted: Any, repetition: float) -> Any:
    """Logits that are lower by `subtracted` after vLLM has applied this repetition penalty.

    `logits` and `subtracted` are tensors of torch. The penalty divides a positive logit and
    multiplies a negative one, so its inverse does the opposite.
    """
    if repetition == 1.0:
        return logits - subtracted
    wanted = (logits / repetition).where(logits > 0, logits * repetition) - subtracted
    return (wanted * repetition).where(wanted > 0, wanted / repetition)
