"""Error of the torch engine's bfloat16 against float32, beside the bfloat16 of transformers.

    python -m bench.precision --checkpoint FOLDER [--prompts 200] [--threads 1]

It needs an instruct model with a chat template. Every prompt is rendered by the template and
computed whole. For the next token, the 5 most probable tokens of the reference are compared:

    mean, p99, max   of |difference of log-probability| over these tokens and all prompts
    argmax_lost      prompts whose most probable token is not the reference's
    argmax_lost_alone   of them, prompts where transformers' bfloat16 has the reference's token
    lost_gap         of the argmax_lost prompts, the greatest difference in log-probability between
                     the reference's first and second token: near ties have small ones
    answer, margin   the greedy answer to QUESTION; the log-probability of the reference's first
                     token less that of its second token, below 0 if they changed places

The reference is float32 of transformers, or of the engine if transformers is missing. A row with
the engine's float32 shows that both agree. One thread is the default, because OpenMP's threads wait
by spinning: on a machine with other work, two threads take many times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer

from backends.engine.interface import Work
from backends.engine.torch.mixed_products import ROUNDED_ROWS_MIN, rounds
from backends.engine.torch.torch_engine import TorchEngine
from backends.text.tokenizer import Tokenizer
from bench.precision.prompts import prompts as all_prompts
from loadtest.harness.benchmark import BenchmarkRun, benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import CannotMeasure

QUESTION, ANSWER = "What is the capital of France?", "Paris"
ANSWER_TOKENS_MAX = 16
COMPARED = 5  # most probable tokens of the reference
ERROR_GOAL = 0.5  # of transformers' bfloat16
BLOCK_TOKENS = 64
PROGRESS_STEP = 50  # prompts between two lines of progress


class Model(Protocol):
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float32 logits [vocabulary] of the token after `token_ids`."""
        ...


class Ours:
    def __init__(self, checkpoint: Path, dtype: str, threads: int, tokens_max: int) -> None:
        pages = -(-tokens_max // BLOCK_TOKENS)
        self._engine = TorchEngine.load(checkpoint, pages, BLOCK_TOKENS, dtype, threads=threads)
        self._pages = list(range(pages))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        pages = self._pages[: -(-len(token_ids) // BLOCK_TOKENS)]
        return torch.from_numpy(self._engine.forward([Work(token_ids, 0, pages)])[0].copy())


class Theirs:
    def __init__(self, library: Any, checkpoint: Path, dtype: str) -> None:
        self._model: Any = library.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype)
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        found = self._model(torch.tensor([list(token_ids)]), logits_to_keep=1)
        logits: torch.Tensor = found.logits[0, -1].float()
        return logits


@dataclass(frozen=True, slots=True)
class Predictions:
    """The log-probabilities [prompts, vocabulary] of a model, and its answer to QUESTION."""

    probabilities: torch.Tensor
    asked: torch.Tensor  # [vocabulary], of QUESTION
    answer: str


@dataclass(frozen=True, slots=True)
class PromptSet:
    tokenizer: Tokenizer
    prompts: list[list[int]]
    question: list[int]
    end_ids: tuple[int, ...]

    def found(self, name: str, model: Model) -> Predictions:
        """Compute all prompts; standard error has the progress."""
        made = []
        for index, prompt in enumerate(self.prompts):
            if index % PROGRESS_STEP == 0:
                console.print(f"{name}: prompt {index} of {len(self.prompts)}")
            made.append(model.logits(prompt).log_softmax(-1))
        asked = model.logits(self.question).log_softmax(-1)
        answer = [int(asked.argmax())]
        while len(answer) < ANSWER_TOKENS_MAX and answer[-1] not in self.end_ids:
            answer.append(int(model.logits([*self.question, *answer]).argmax()))
        return Predictions(torch.stack(made), asked, self.tokenizer.decode(answer))


def row_of(
    name: str, found: Predictions, reference: Predictions, theirs: Predictions | None
) -> dict[str, Cell]:
    """The cells of a model; `theirs`: transformers' bfloat16."""
    expected, best = reference.probabilities.topk(COMPARED)
    errors = (found.probabilities.gather(1, best) - expected).abs().flatten()
    is_lost = found.probabilities.argmax(-1) != best[:, 0]
    gaps = expected[:, 0] - expected[:, 1]
    alone = None
    if theirs is not None:
        alone = int((is_lost & (theirs.probabilities.argmax(-1) == best[:, 0])).sum())
    first, second = reference.asked.topk(2).indices
    return {
        "model": name,
        "mean": round(float(errors.mean()), 5),
        "p99": round(float(errors.quantile(0.99)), 4),
        "max": round(float(errors.max()), 4),
        "argmax_lost": int(is_lost.sum()),
        "argmax_lost_alone": alone,
        "lost_gap": round(float(gaps[is_lost].max()), 4) if is_lost.any() else None,
        "margin": round(float(found.asked[first] - found.asked[second]), 4),
        "answer": found.answer,
    }


def targets_of(
    ours: dict[str, Cell], theirs: dict[str, Cell] | None, reference: Predictions
) -> list[Target]:
    missing = "" if theirs is not None else "transformers is not installed"
    share = None
    if theirs is not None:
        share = round(float(ours["mean"] or 0) / float(theirs["mean"] or 1), 3)
    lost = ours["argmax_lost_alone"]
    gap = f"float32's gap is at most {ours['lost_gap']}" if lost else ""
    is_known = ANSWER in reference.answer
    answered = float(ANSWER in str(ours["answer"])) if is_known else None
    why = "" if is_known else f"float32 answers {reference.answer!r}"
    return [
        Target("error_over_transformers", share, "<=", ERROR_GOAL, why=missing),
        Target(
            "argmax_lost_alone", None if lost is None else float(lost), "<=", 0, why=missing or gap
        ),
        Target("answers_as_float32", answered, ">=", 1, why=why),
    ]


def transformers_or_none() -> Any:
    try:
        import transformers
    except ImportError:
        console.print("transformers is not installed: the reference is the engine's float32")
        return None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def asked_of(checkpoint: Path, count: int) -> PromptSet:
    tokenizer = Tokenizer.load(checkpoint)

    def rendered(prompt: str) -> list[int]:
        text = tokenizer.apply_chat([{"role": "user", "content": prompt}])
        return tokenizer.encode(text, add_special=False)

    chosen = all_prompts()
    if count > len(chosen):
        raise CannotMeasure(f"--prompts {count}: there are {len(chosen)} prompts")
    spread = [chosen[index * len(chosen) // count] for index in range(count)]
    return PromptSet(
        tokenizer, [rendered(prompt) for prompt in spread], rendered(QUESTION), tokenizer.eos_ids
    )


def measure(run: BenchmarkRun, checkpoint: Path, count: int, threads: int) -> None:
    asked = asked_of(checkpoint, count)
    tokens_max = max(map(len, [*asked.prompts, asked.question])) + ANSWER_TOKENS_MAX
    torch.set_num_threads(threads)
    library = transformers_or_none()
    ways: dict[str, Callable[[], Model]] = {}
    if library is not None:
        ways["transformers float32"] = lambda: Theirs(library, checkpoint, "float32")
        ways["transformers bfloat16"] = lambda: Theirs(library, checkpoint, "bfloat16")
    ways["ours float32"] = lambda: Ours(checkpoint, "float32", threads, tokens_max)
    ways["ours bfloat16"] = lambda: Ours(checkpoint, "bfloat16", threads, tokens_max)
    found = {name: asked.found(name, load()) for name, load in ways.items()}
    reference, theirs = next(iter(found.values())), found.get("transformers bfloat16")
    for name, each in found.items():
        run.rows.append(row_of(name, each, reference, theirs))
    rows = {str(row["model"]): row for row in run.rows}
    run.constants = {
        "prompts": count,
        "prompt_tokens_mean": round(sum(map(len, asked.prompts)) / count, 1),
        "compared_tokens": COMPARED,
        "form": "rounded" if rounds(ROUNDED_ROWS_MIN) else "exact",  # of products in bfloat16
    }
    run.targets = targets_of(rows["ours bfloat16"], rows.get("transformers bfloat16"), reference)


def main(
    checkpoint: Annotated[Path, typer.Option(help="Hugging Face folder of an instruct model.")],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, at most 200.")] = 200,
    threads: Annotated[int, typer.Option(min=1, help="torch's threads.")] = 1,
) -> None:
    """Measure the error of bfloat16 against float32; the last line is JSON."""
    with benchmark("precision") as run:
        measure(run, checkpoint, prompts, threads)


if __name__ == "__main__":
    typer.run(main)
