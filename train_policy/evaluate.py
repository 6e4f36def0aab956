"""Evaluation: policies on prompts that they have not seen.

Owns which prompts count and what is replayed; figures are made in `figures.py`, shown by `evaluate_report.py` and
`plots.py`. Invariant: the prompts that count are replayed alone, in their order, each token a decode step, the cache
carried over from prompt to prompt, and every policy gets the same ones.
"""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.npz import read_npz
from flashmoe_jax.policy import STATIC_NAME
from flashmoe_jax.policy.saved import POLICY_JSON
from flashmoe_jax.telemetry.trace import WIDE_COLUMNS, Trace, load_trace
from train_policy.audit import Auditor
from train_policy.provenance import TrainedOn, fingerprint, read_trained_on
from train_policy.replay import NAMES, Replayer
from train_policy.replay_command import slots_of
from train_policy.replay_steps import joined

REFERENCES = ("lru", "decayed", "min")  # every figure is made with these
NOT_COMPARED = ("static", "min-bypass")  # hindsight; keeps nothing that it could have evicted
ALL = "all"  # tests together, in the place of a test
# Where one prompt is all there is, pieces of it stand in for prompts.
BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy that is evaluated."""

    name: str
    folder: Path
    inputs: frozenset[str] = frozenset()
    trained_on: tuple[TrainedOn, ...] = ()

    @property
    def domains(self) -> str:
        """What it was trained on, for a person."""
        names = [t.domain or Path(t.name).stem for t in self.trained_on]
        return ", ".join(dict.fromkeys(names)) or "not said"


class Trial(NamedTuple):
    """One trace, as far as it counts, in N units that a bootstrap draws: its prompts, or the blocks of a single one."""

    name: str
    file: str
    note: str  # which prompts count, and why
    num_prompts: int
    tokens: np.ndarray  # [N]
    num_experts: int
    slots: dict[str, int]  # per layer, by what was asked for
    counts: dict[str, np.ndarray]  # by policy, int64 [slots, L, N, NUM_COLUMNS]

    @property
    def num_layers(self) -> int:
        return next(iter(self.counts.values())).shape[1]


def read_candidates(folders: Sequence[Path]) -> list[Candidate]:
    """The policies in `folders`, each with a name of its own.

    Raises:
        ConfigError: a folder holds no policy.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError("a policy is given twice; give each folder once")
    if taken := set(names) & (set(NAMES) - {"static"}):
        raise ConfigError(f"the policy folder {', '.join(sorted(taken))} has the name of a known policy; rename it")
    return [_candidate(name, folder) for name, folder in zip(names, folders, strict=True)]


def _candidate(name: str, folder: Path) -> Candidate:
    learned, static = folder / POLICY_JSON, folder / STATIC_NAME
    try:
        if learned.exists():
            text = json.loads(learned.read_text(encoding="utf-8"))
            inputs, meta = frozenset(text.get("inputs", ())), text.get("trained", {})
        elif static.exists():
            inputs, meta = frozenset(), json.loads(str(read_npz(static)["meta"]))
        else:
            raise ConfigError(f"{folder} holds no policy (neither {POLICY_JSON} nor {STATIC_NAME}); fit writes one")
        return Candidate(name=name, folder=folder, inputs=inputs, trained_on=tuple(read_trained_on(meta)))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} is not a whole policy ({error}); fit it again") from None


class PromptChoice(NamedTuple):
    """The prompts of a trace that count."""

    seq_id: np.ndarray
    note: str


def choose_prompts(trace: Trace, wanted: str, candidates: Sequence[Candidate], file: str) -> PromptChoice:
    """Which prompts of a trace count.

    Args:
        trace: as loaded.
        wanted: `auto`, those that no candidate has seen; `all`; or numbers and ranges, `3,10-19`.
        candidates: whose training is looked at.
        file: name of the trace, for messages.

    Raises:
        ConfigError: no prompt is left, or `wanted` is not understood.
    """
    every = np.unique(trace.seq_id)
    mark = fingerprint(trace)
    seen = [(c, t) for c in candidates for t in c.trained_on if t.fingerprint == mark]
    names = ", ".join(dict.fromkeys(c.name for c, _ in seen))
    if wanted == "all":
        return PromptChoice(every, f"all prompts; {names} saw some of them in training" if seen else "all prompts")
    if wanted != "auto":
        chosen = every[np.isin(every, _numbers(wanted))]
        if not len(chosen):
            raise ConfigError(f"trace {file} has none of the prompts {wanted}; it has {every[0]} to {every[-1]}")
        return PromptChoice(chosen, f"prompts {wanted}")
    if not seen:
        return PromptChoice(every, "all prompts; no policy is known to have seen them")
    unseen = every[[all(int(p) in t.held_out for _, t in seen) for p in every]]
    if not len(unseen):
        raise ConfigError(
            f"no prompt of trace {file} was held out when {names} was trained on it; give another trace, or "
            "--test-prompts all to evaluate on what training saw"
        )
    return PromptChoice(unseen, f"the {len(unseen)} of {len(every)} prompts that training of {names} held out")


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ConfigError(f"--test-prompts {text!r} is not understood; write auto, all, or for example 3,10-19")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers


def run_tests(
    traces: Sequence[Path],
    candidates: Sequence[Candidate],
    against: Sequence[str],
    *,
    slots: Sequence[str],
    is_default_slots: bool,
    num_experts: int | None,
    test_prompts: str,
    guard: bool,
    say: Callable[[str], None],
) -> list[Trial]:
    """Replays every policy on every trace.

    Args:
        traces: `.npz` files, each a test of its own.
        candidates: what is evaluated.
        against: what it is compared with; REFERENCES are among them.
        slots: slots per layer, `16` or `25%`.
        is_default_slots: whether shares below a token's experts may be raised to those.
        num_experts: per layer, where a trace does not say.
        test_prompts: as for `choose_prompts`.
        guard: whether learned policies are under guard, as in the engine.
        say: gets a line per trace and policy.

    Raises:
        ConfigError: a trace or policy that cannot be used, or not together.
    """
    wide = frozenset().union(*(c.inputs for c in candidates)) & set(WIDE_COLUMNS)
    loaded = [(path, load_trace(path, wide_columns=wide)) for path in traces]
    names = _test_names(loaded)
    # What can be refused is refused before the first replay.
    prepared = []
    for name, (path, raw) in zip(names, loaded, strict=True):
        choice = choose_prompts(raw, test_prompts, candidates, path.name)
        trace = joined([raw], num_experts)
        per_layer = _slots(slots, trace, is_default_slots)
        trace = trace.take(np.isin(raw.seq_id, choice.seq_id))
        replayer = Replayer(trace, guard=guard)
        for policy in [*against, *(str(c.folder) for c in candidates)]:
            replayer.check(policy, list(per_layer.values()))
        prepared.append((name, path, choice, trace, per_layer, replayer))
    tests = []
    for name, path, choice, trace, per_layer, replayer in prepared:
        _, unit_of_step = np.unique(trace.seq_id, return_inverse=True)
        note = choice.note
        if len(choice.seq_id) == 1:
            unit_of_step = np.arange(len(trace.ids)) // BLOCK_TOKENS
            note += f"; it is one, and intervals are over its blocks of {BLOCK_TOKENS} tokens"
        say(f"{name}: {len(trace.ids)} tokens, {note}")
        auditor = Auditor.of(replayer.steps, unit_of_step)
        counts = {}
        for policy, given in [*((p, p) for p in against), *((c.name, str(c.folder)) for c in candidates)]:
            began = time.perf_counter()
            results = replayer.replay(given, list(per_layer.values()), log_victims=True)
            counts[policy] = np.stack([auditor.counts(result.run) for result in results])
            say(f"{name}: {policy} {time.perf_counter() - began:.1f} s")
        tests.append(
            Trial(
                name=name,
                file=path.name,
                note=note,
                num_prompts=len(choice.seq_id),
                tokens=np.bincount(unit_of_step),
                num_experts=trace.meta["experts"],
                slots=per_layer,
                counts=counts,
            )
        )
    return tests


def _test_names(loaded: Sequence[tuple[Path, Trace]]) -> list[str]:
    """The domain of each trace, with its file's name or folder where that does not tell them apart."""
    if len({path.resolve() for path, _ in loaded}) < len(loaded):
        raise ConfigError("a trace is given twice; give each once")
    domains = [str(trace.meta.get("domain") or path.stem) for path, trace in loaded]
    longer = [
        domains,
        [f"{domain} ({path.stem})" for domain, (path, _) in zip(domains, loaded, strict=True)],
        [path.resolve().parent.name for path, _ in loaded],
        [str(path.resolve()) for path, _ in loaded],
    ]
    return next(names for names in longer if len(set(names)) == len(names) and ALL not in names)


def _slots(wanted: Sequence[str], trace: Trace, is_default: bool) -> dict[str, int]:
    top_k = trace.ids.shape[2]
    per_layer: dict[str, int] = {}
    for text in wanted:
        number = slots_of(text, trace.meta["experts"])
        number = max(number, top_k) if is_default else number
        if number not in per_layer.values():
            per_layer[text] = number
    return per_layer
