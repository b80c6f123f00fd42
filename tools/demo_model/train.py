"""Train the demo checkpoint on a CPU and write it in Hugging Face format.

Here: tokenizer, chat form of the text, training loop, validation, files of the checkpoint. Not
here: the source of the text (`corpus.py`), the picture of the loss (`plot_loss.py`).

    python -m tools.demo_model.train --minutes 28 --out /tmp/demo_checkpoint

The learning rate follows the clock, not a step count, so a run ends on time on any machine. Two
runs with the same seed therefore start alike but do not end with identical bits.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from tools.demo_model.corpus import Chapter, load_chapters

EOS, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (EOS, USER, ASSISTANT)
VOCAB_TOKENS = 2048
SEQUENCE_TOKENS = 512
POSITIONS_TOKENS_MAX = 8192
CHAPTERS_PER_HELD_OUT = 50
CHAT_SHARE = 0.3
USER_CHARS_MAX = 240
REPLY_PARAGRAPHS_MAX = 3
REPORT_EVERY_S = 15.0
SAVE_EVERY_S = 180.0
PROGRESS_COLUMNS = ("elapsed_s", "step", "tokens", "training_loss", "validation_loss")

ProgressRow = tuple[int, int, int, str, str]
"""One row of loss.csv, in the order of PROGRESS_COLUMNS; the loss not measured is empty."""

# The turn marks are single tokens, so a template needs no white space of its own. A system turn has
# no mark in the training text: the model receives it as a user turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|endoftext|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Split:
    """Token streams of one part of the text: as written, and cut into chat turns."""

    prose: torch.Tensor
    chat: torch.Tensor


@dataclass(frozen=True, slots=True)
class Validation:
    """Mean loss on held-out prose, in nats per token, and the counts to compare across models."""

    loss: float
    tokens: int
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    cache = Path(tempfile.gettempdir()) / "demo_checkpoint_text"
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--minutes", type=float, default=28.0, help="training time (default 28)")
    parser.add_argument("--seed", type=int, default=1, help="weights and sampling (default 1)")
    parser.add_argument("--start-from", type=Path, help="go on from the weights in this folder")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (default 4)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak (default 2e-3)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--text-cache", type=Path, default=cache, help=f"default {cache}")
    return parser.parse_args()


def train_tokenizer(chapters: list[Chapter]) -> Tokenizer:
    """Byte-level BPE: every string can be encoded, whatever the training text lacked."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("\n\n".join(chapter) for chapter in chapters), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_TOKENS
    return tokenizer


def split_chapters(chapters: list[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """(training, held out): every fiftieth chapter is held out, which is 2 % of each book."""
    middle = CHAPTERS_PER_HELD_OUT // 2
    held_out = [c for i, c in enumerate(chapters) if i % CHAPTERS_PER_HELD_OUT == middle]
    training = [c for i, c in enumerate(chapters) if i % CHAPTERS_PER_HELD_OUT != middle]
    return training, held_out


def chat_text(chapter: Chapter, rng: random.Random) -> str:
    """The chapter as short conversations: a paragraph's end is the user, what follows the reply.

    Without this the turn marks would be untrained vectors, and a chat would begin with noise; and
    the model would learn to stop only at the end of a chapter, thousands of tokens away.
    """
    turns: list[str] = []
    start = 0
    while start + 1 < len(chapter):
        paragraphs = rng.randint(1, REPLY_PARAGRAPHS_MAX)
        reply = "\n\n".join(chapter[start + 1 : start + 1 + paragraphs])
        turns.append(f"{USER}{_last_sentences(chapter[start])}{ASSISTANT}{reply}{EOS}")
        start += 1 + paragraphs
    return "".join(turns)


def _last_sentences(paragraph: str) -> str:
    """As many whole sentences from the end as fit the length of a chat message, at least one."""
    sentences = paragraph.replace("? ", "?\n").replace("! ", "!\n").replace(". ", ".\n").split("\n")
    kept = sentences.pop()
    while sentences and len(kept) + len(sentences[-1]) < USER_CHARS_MAX:
        kept = f"{sentences.pop()} {kept}"
    return kept


def tokenize(chapters: list[Chapter], tokenizer: Tokenizer, seed: int) -> Split:
    rng = random.Random(seed)
    shuffled = rng.sample(chapters, len(chapters))
    prose = ["\n\n".join(chapter) + EOS for chapter in shuffled]
    chat = [chat_text(chapter, rng) for chapter in shuffled]
    return Split(*(_stream(texts, tokenizer) for texts in (prose, chat)))


def _stream(texts: list[str], tokenizer: Tokenizer) -> torch.Tensor:
    encodings = tokenizer.encode_batch(texts)
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_TOKENS,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS_TOKENS_MAX,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def mean_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats per token; tokens is (sequences, length + 1)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def sample_batch(split: Split, sequences: int) -> torch.Tensor:
    """Windows at random positions; about a CHAT_SHARE of them from the chat stream."""
    rows: list[torch.Tensor] = []
    for is_chat in (torch.rand(sequences) < CHAT_SHARE).tolist():
        stream = split.chat if is_chat else split.prose
        start = int(torch.randint(len(stream) - SEQUENCE_TOKENS, ()))
        rows.append(stream[start : start + SEQUENCE_TOKENS + 1])
    return torch.stack(rows)


@torch.no_grad()
def validate(model: LlamaForCausalLM, held_out: Split, text_bytes: int) -> Validation:
    """Loss over consecutive windows of the held-out prose; no token is counted twice."""
    model.eval()
    windows = (len(held_out.prose) - 1) // SEQUENCE_TOKENS
    losses: list[float] = []
    for window in range(windows):
        start = window * SEQUENCE_TOKENS
        tokens = held_out.prose[start : start + SEQUENCE_TOKENS + 1].unsqueeze(0)
        losses.append(float(mean_loss(model, tokens)))
    model.train()
    tokens_scored = windows * SEQUENCE_TOKENS
    mean = sum(losses) / windows
    return Validation(mean, tokens_scored, text_bytes / len(held_out.prose))


def learning_rate(share: float, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, then a cosine over the share of time used, down to 2 %."""
    warm_up = min(1.0, (steps + 1) / 100)
    return peak * warm_up * (0.02 + 0.49 * (1 + math.cos(math.pi * min(share, 1.0))))


def _optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(arguments: argparse.Namespace) -> None:
    chapters = load_chapters(arguments.text_cache)
    training_chapters, held_out_chapters = split_chapters(chapters)
    tokenizer = train_tokenizer(training_chapters)
    training = tokenize(training_chapters, tokenizer, arguments.seed)
    held_out = tokenize(held_out_chapters, tokenizer, arguments.seed)
    held_out_bytes = sum(len("\n\n".join(c).encode()) for c in held_out_chapters)
    model = build_model(arguments.seed)
    if arguments.start_from:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(arguments.start_from).state_dict())
    print(
        f"parameters={sum(p.numel() for p in model.parameters())}"
        f" training_tokens={len(training.prose)} held_out_tokens={len(held_out.prose)}",
        flush=True,
    )
    write_tokenizer(arguments.out, tokenizer)
    write_model(arguments.out, model)
    TrainingRun(arguments, model, training, held_out, held_out_bytes).loop()


class TrainingRun:
    """One training run: the loop, its clock, and the rows of loss.csv."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        model: LlamaForCausalLM,
        training: Split,
        held_out: Split,
        held_out_bytes: int,
    ) -> None:
        self._arguments = arguments
        self._model = model
        self._training = training
        self._held_out = held_out
        self._held_out_bytes = held_out_bytes
        before = _read_progress(arguments.start_from) if arguments.start_from else []
        self._rows = before
        self._seconds_before, self._steps_before, self._tokens_before = (
            before[-1][:3] if before else (0, 0, 0)
        )
        self._started_s = time.monotonic()
        self._steps = 0

    def loop(self) -> None:
        budget_s = self._arguments.minutes * 60
        optimizer = _optimizer(self._model)
        recent: list[float] = []
        reported_s = saved_s = 0.0
        while (elapsed_s := time.monotonic() - self._started_s) < budget_s:
            rate = learning_rate(elapsed_s / budget_s, self._steps, self._arguments.learning_rate)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = mean_loss(self._model, sample_batch(self._training, self._arguments.batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self._steps += 1
            recent.append(loss.item())
            if elapsed_s - reported_s >= REPORT_EVERY_S:
                self._report(elapsed_s, recent)
                reported_s, recent = elapsed_s, []
            # The first checkpoint comes early: it already proves that the files are right.
            if elapsed_s - saved_s >= (SAVE_EVERY_S if saved_s else 60.0):
                self._save(elapsed_s)
                saved_s = elapsed_s
        self._save(time.monotonic() - self._started_s)

    def _progress(self, elapsed_s: float) -> tuple[int, int, int]:
        """(seconds, steps, tokens) of this run and of the runs that it continues."""
        tokens = self._steps * self._arguments.batch * SEQUENCE_TOKENS
        return (
            self._seconds_before + round(elapsed_s),
            self._steps_before + self._steps,
            self._tokens_before + tokens,
        )

    def _report(self, elapsed_s: float, recent: list[float]) -> None:
        mean = sum(recent) / len(recent)
        seconds, steps, tokens = self._progress(elapsed_s)
        tokens_per_s = (tokens - self._tokens_before) / elapsed_s
        print(
            f"elapsed_s={seconds} step={steps} tokens={tokens} loss={mean:.3f}"
            f" tokens_per_s={tokens_per_s:.0f}",
            flush=True,
        )
        self._rows.append((seconds, steps, tokens, f"{mean:.4f}", ""))

    def _save(self, elapsed_s: float) -> None:
        result = validate(self._model, self._held_out, self._held_out_bytes)
        bits_per_byte = result.loss / math.log(2) / result.bytes_per_token
        seconds, steps, tokens = self._progress(elapsed_s)
        print(
            f"elapsed_s={seconds} step={steps} tokens={tokens}"
            f" validation_loss={result.loss:.4f} perplexity={result.perplexity:.2f}"
            f" bits_per_byte={bits_per_byte:.3f} validation_tokens={result.tokens}",
            flush=True,
        )
        self._rows.append((seconds, steps, tokens, "", f"{result.loss:.4f}"))
        write_model(self._arguments.out, self._model)
        with (self._arguments.out / "loss.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(PROGRESS_COLUMNS)
            writer.writerows(self._rows)


def _read_progress(folder: Path) -> list[ProgressRow]:
    with (folder / "loss.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [(int(row[0]), int(row[1]), int(row[2]), row[3], row[4]) for row in rows]


def write_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """The JSON files are written by hand so that each transformers release finds its fields."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    described = {
        str(token_id): {
            "content": token.content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token_id, token in sorted(added.items())
    }
    names = {"bos_token": EOS, "eos_token": EOS, "pad_token": EOS}
    marks = {"additional_special_tokens": [USER, ASSISTANT]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": described,
        **names,
        **marks,
        "model_max_length": POSITIONS_TOKENS_MAX,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(out / "tokenizer_config.json", config)
    _write_json(out / "special_tokens_map.json", names | marks)


def write_model(out: Path, model: LlamaForCausalLM) -> None:
    """Weights and configs; each file is replaced atomically, so a reader never sees half of it."""
    with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        # Both spellings: releases before 5 read rope_theta and torch_dtype at the top level.
        config |= {"rope_theta": 10000.0, "torch_dtype": "float32", "dtype": "float32"}
        _write_json(Path(folder) / "config.json", config)
        generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        _write_json(Path(folder) / "generation_config.json", generation)
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            (Path(folder) / name).chmod(0o644)
            os.replace(Path(folder) / name, out / name)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers_logging.disable_progress_bar()
    train(arguments)


if __name__ == "__main__":
    main()
