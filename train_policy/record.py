"""Recording: prompts go through the engine in batches, and what their tokens chose becomes one trace.

Owns batching, the parts on disk, and how parts become a file. The engine records; the file's format is
`telemetry/trace.py`'s. Invariant: a trace reads as if its prompts had been generated one after the other in the order
of their file, whatever the batches were, and it has the same bytes whether or not recording was interrupted: a part
that exists is whole, and only the options that made it may go on with it.
"""

import dataclasses
import functools
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_jax.engine.budget import prompt_bucket, round_up
from flashmoe_jax.engine.engine import Engine
from flashmoe_jax.errors import ConfigError, PromptError
from flashmoe_jax.telemetry.trace import DECODE, PREFILL, Pieces, Trace, save_trace
from flashmoe_jax.text.sampling_params import MAX_SEED, SamplingParams
from train_policy.prompts import Prompt

# Contexts are multiples of this, so that prompts of all lengths share a few compiled programs.
_CONTEXT_STEP = 256
_JOB_NAME = "job.json"
_REHEARSED_TOKENS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts that are generated together."""

    prompts: tuple[int, ...]  # places in the list of prompts
    bucket: int  # tokens that each prompt is padded to
    context: int  # cache tokens per prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is recorded: everything that the trace depends on."""

    token_ids: list[list[int]]  # per prompt
    batches: list[Batch]
    batch_size: int
    max_new_tokens: int
    sampling: SamplingParams
    ignore_eos: bool
    wide_columns: tuple[str, ...]
    meta: dict[str, Any]  # the trace's, beside the model's
    identity: dict[str, Any]  # of the command, by option

    @property
    def context(self) -> int:
        return max(batch.context for batch in self.batches)


def encode(
    prompts: Sequence[Prompt],
    encoder: Callable[[str], list[int]],
    *,
    max_prompt_tokens: int | None,
    max_new_tokens: int,
    max_position: int,
) -> list[list[int]]:
    """Token ids of every prompt, cut to their first `max_prompt_tokens`.

    Raises:
        PromptError: a prompt without tokens, or longer than the model's positions allow.
    """
    limit = max_position - max_new_tokens
    if limit < 1:
        raise PromptError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the model's {max_position} positions; "
            f"give at most {max_position - 1}"
        )
    token_ids = []
    for prompt in prompts:
        ids = encoder(prompt.text)[:max_prompt_tokens]
        if not ids:
            raise PromptError(f"the prompt in line {prompt.line} has no tokens; take it out")
        if len(ids) > limit:
            raise PromptError(
                f"the prompt in line {prompt.line} has {len(ids)} tokens and the model has room for {limit} before "
                f"{max_new_tokens} new ones; cut prompts with --max-prompt-tokens {limit}"
            )
        token_ids.append(ids)
    return token_ids


def make_batches(
    token_ids: Sequence[Sequence[int]], batch_size: int, max_new_tokens: int, max_position: int
) -> list[Batch]:
    """Prompts of similar length side by side, the batches of the most frequent shape first."""
    # Whole batches from the longest down: the one that is not full has the shortest prompts.
    longest_first = sorted(range(len(token_ids)), key=lambda i: (-len(token_ids[i]), i))
    batches = []
    for first in range(0, len(longest_first), batch_size):
        chosen = tuple(longest_first[first : first + batch_size])
        longest = max(len(token_ids[i]) for i in chosen)
        context = min(round_up(longest + max_new_tokens, _CONTEXT_STEP), max_position)
        batches.append(Batch(prompts=chosen, bucket=prompt_bucket(longest), context=context))
    frequency = Counter((batch.bucket, batch.context) for batch in batches)
    return sorted(batches, key=lambda b: (-frequency[b.bucket, b.context], b.bucket, b.context))


class Parts:
    """The folder beside the output that holds what is recorded so far, a folder per batch."""

    def __init__(self, out: Path):
        self.folder = out.with_name(out.name + ".parts")

    def open(self, job: Job) -> None:
        """Makes the folder, or goes on with it.

        Raises:
            ConfigError: it is of another command, or cannot be written.
        """
        note = self.folder / _JOB_NAME
        try:
            self.folder.mkdir(exist_ok=True)
            if note.exists():
                _check_same(json.loads(note.read_text()), job.identity, self.folder)
                return
            if any(self.folder.iterdir()):
                raise ConfigError(f"{self.folder} exists and was not made by record; choose another --out")
            partial = note.with_suffix(".part")
            partial.write_text(json.dumps(job.identity, indent=1))
            partial.rename(note)
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"{self.folder} cannot be used: {error}; choose another --out") from error

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def write(self, number: int, columns: dict[str, np.ndarray]) -> None:
        """Writes the part of a batch; it appears whole or not at all."""
        partial = Path(tempfile.mkdtemp(dir=self.folder, prefix=".part-"))
        try:
            for name, array in columns.items():
                with (partial / f"{name}.npy").open("wb") as file:
                    np.save(file, array)
                    file.flush()
                    os.fsync(file.fileno())
            partial.rename(self._path(number))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def reader(self) -> Callable[[int, str], np.ndarray]:
        """Memory-mapped columns by part and name; a bounded number is kept open."""

        @functools.lru_cache(maxsize=256)
        def read(number: int, name: str) -> np.ndarray:
            return np.load(self._path(number) / f"{name}.npy", mmap_mode="r")

        return read

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}"


def _check_same(was: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for name in [*now, *(was.keys() - now.keys())]:
        if was.get(name) != now.get(name):
            raise ConfigError(
                f"{folder} was begun with {name} {was.get(name)} and {name} is {now.get(name)} now; repeat the first "
                "command to go on, give another --out, or delete that folder"
            )


class Forecast:
    """How long the rest takes, from what was measured."""

    def __init__(self, job: Job, remaining: Sequence[Batch]):
        self._left = Counter((b.bucket, b.context) for b in remaining)
        self._compile_prefill_s = self._compile_decode_s = 0.0
        self._prefill_s_per_token = 0.0
        self._decode_s = 0.0
        self._compiled: set[tuple[int, int]] = set()

    def rehearsed(self, batch: Batch, prefill_s: float, decode_s: float) -> None:
        """A first run of a shape, most of it compilation."""
        self._compile_prefill_s, self._compile_decode_s = prefill_s, decode_s
        self._compiled.add((batch.bucket, batch.context))

    def measured(self, batch: Batch, prefill_s: float, decode_s: float) -> None:
        """A run of a compiled shape."""
        self._prefill_s_per_token = prefill_s / batch.bucket
        self._decode_s = decode_s
        self._left[batch.bucket, batch.context] -= 1

    @property
    def seconds(self) -> float:
        """Of what is left."""
        running = sum(
            number * (self._prefill_s_per_token * bucket + self._decode_s) for (bucket, _), number in self._left.items()
        )
        # Prompts are compiled once for each padded length, steps once for each context.
        new_contexts = {context for _, context in self._left} - {context for _, context in self._compiled}
        compiling = self._compile_prefill_s * len(self._left.keys() - self._compiled)
        return running + compiling + self._compile_decode_s * len(new_contexts)


@dataclasses.dataclass
class Report:
    """Who is told how recording goes."""

    forecast: Callable[[float], None] = lambda seconds: None  # once: seconds that the rest takes, about
    advanced: Callable[[int], None] = lambda num_prompts: None  # prompts recorded


def record(engine: Engine, job: Job, parts: Parts, report: Report) -> None:
    """Records every batch that has no part yet.

    The first one is rehearsed, so that what is measured, and forecast, is free of compilation.
    """
    remaining = [n for n in range(len(job.batches)) if not parts.has(n)]
    report.advanced(len(job.token_ids) - sum(len(job.batches[n].prompts) for n in remaining))
    forecast = Forecast(job, [job.batches[n] for n in remaining])
    for place, number in enumerate(remaining):
        batch = job.batches[number]
        if place == 0:
            _, *seconds = _generate(engine, job, batch, min(_REHEARSED_TOKENS, job.max_new_tokens))
            forecast.rehearsed(batch, *seconds)
        trace, *seconds = _generate(engine, job, batch, job.max_new_tokens)
        if place == 0:
            forecast.measured(batch, *seconds)
            report.forecast(forecast.seconds)
        parts.write(number, _columns(trace, len(batch.prompts), job.wide_columns))
        report.advanced(len(batch.prompts))


def _generate(engine: Engine, job: Job, batch: Batch, max_new_tokens: int) -> tuple[Trace, float, float]:
    """The trace of one batch, and the seconds of its prefill and of the rest.

    A batch of too few prompts is filled up, so that it needs no program of its own.
    """
    began = time.perf_counter()
    filled = [batch.prompts[i % len(batch.prompts)] for i in range(job.batch_size)]
    sampling = [
        dataclasses.replace(job.sampling, seed=(job.sampling.seed + prompt) % (MAX_SEED + 1)) for prompt in filled
    ]
    pieces = engine.generate(
        [job.token_ids[prompt] for prompt in filled],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        ignore_eos=job.ignore_eos,
        session=engine.session(job.batch_size, batch.context),
    )
    for _ in pieces:
        pass
    prefill_s = engine.stats()["ttft_ms"] / 1e3
    return engine.take_trace(), prefill_s, time.perf_counter() - began - prefill_s


def _columns(trace: Trace, num_prompts: int, wide_columns: Sequence[str]) -> dict[str, np.ndarray]:
    """A part: rows sorted by prompt, and how many rows each of the first `num_prompts` has."""
    place = trace.seq_id - trace.seq_id.min()
    order = np.argsort(place, kind="stable")
    rows = np.bincount(place, minlength=num_prompts)[:num_prompts]
    chosen = trace.take(order[: rows.sum()])
    names = ("ids", "token", *wide_columns)
    return {"rows": rows} | {name: getattr(chosen, name) for name in names}


def join(job: Job, parts: Parts, out: Path, model_meta: dict[str, Any]) -> Trace:
    """Writes the trace of all parts and returns it without its wide columns, which are never in memory as a whole."""
    read = parts.reader()
    span_of: dict[int, tuple[int, int, int]] = {}  # prompt -> part, first row, last row + 1
    for number, batch in enumerate(job.batches):
        ends = np.cumsum(read(number, "rows"))
        for prompt, end, rows in zip(batch.prompts, ends, read(number, "rows"), strict=True):
            span_of[prompt] = (number, int(end - rows), int(end))
    prompts = range(len(job.token_ids))

    def pieces(name: str) -> Iterator[np.ndarray]:
        for prompt in prompts:
            number, first, last = span_of[prompt]
            yield read(number, name)[first:last]

    num_rows = [span_of[p][2] - span_of[p][1] for p in prompts]
    prompt_rows = [len(ids) for ids in job.token_ids]
    is_prefill = np.concatenate([np.arange(n) < m for n, m in zip(num_rows, prompt_rows, strict=True)])
    seq_id = np.repeat(np.arange(len(num_rows), dtype=np.int32), num_rows)
    # A prompt is one step, and so is every token after it.
    begins = ~is_prefill | np.concatenate([[True], np.diff(seq_id) != 0])
    trace = Trace(
        ids=np.concatenate(list(pieces("ids"))),
        seq_id=seq_id,
        phase=np.where(is_prefill, PREFILL, DECODE).astype(np.uint8),
        step=(np.cumsum(begins) - 1).astype(np.int32),
        token=np.concatenate(list(pieces("token"))),
        meta={**model_meta, **job.meta},
    )
    wide = {name: Pieces((len(seq_id), *read(0, name).shape[1:]), pieces(name)) for name in job.wide_columns}
    save_trace(trace, out, wide)
    return trace
