"""The reference side of parity: models of transformers with random weights, and what they compute.

Needs torch and transformers; import it only from tests marked `parity` and from `scripts/make_parity_fixtures.py`.
Every model runs in float32 on the CPU with the eager attention and experts, one unpadded sequence at a time.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

logging.disable_progress_bar()
torch.set_num_threads(1)  # The models are tiny; a second thread only waits.

_EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


class Trace(NamedTuple):
    """What a model computed for one sequence."""

    logits_TV: np.ndarray
    expert_id_LTX: np.ndarray  # of the MoE layers, best first
    smallest_gap: float  # least difference between neighbours in rank among the best top_k + 1 probabilities


def random_model(hf_config: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A model of the config with weights drawn so that routing varies between tokens."""
    config = AutoConfig.for_model(**hf_config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **_EAGER).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_draw(name, parameter.shape, generator))
    return model


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if "embed_tokens" in name:
        return values * 0.02 * 64
    if "norm" in name:
        return 1 + 0.2 * values
    if name.endswith("bias"):
        return 0.5 * values
    return values * shape[-1] ** -0.5 * (2.0 if "mlp.gate.weight" in name else 1.0)


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a Hugging Face directory; every key of either side must be found on the other.

    Raises:
        ValueError: a key is missing, unexpected or of another shape.
    """
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True, **_EAGER)
    odd = {kind: found for kind, found in report.items() if found}
    if odd:
        raise ValueError(f"transformers does not load {directory.name} cleanly: {odd}")
    return model.eval()


def run_cached(model: PreTrainedModel, tokens: np.ndarray, prompt_length: int) -> Trace:
    """Prefill of the prompt, then one cached step for each further token."""
    token_1T = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    steps = token_1T.split([prompt_length, *[1] * (len(tokens) - prompt_length)], dim=1)
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    chosen: list[list[np.ndarray]] = [[] for _ in routers]
    gaps: list[float] = []

    def record(layer: int, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        router_logits, _, expert_id = output
        chosen[layer].append(expert_id.numpy())
        best = router_logits.softmax(-1).sort(-1, descending=True).values[..., : expert_id.shape[-1] + 1]
        gaps.append(float((best[..., :-1] - best[..., 1:]).min()))

    hooks = [
        router.register_forward_hook(lambda module, args, output, layer=layer: record(layer, output))
        for layer, router in enumerate(routers)
    ]
    cache = _new_cache(model)
    with torch.inference_mode():
        logits = [model(step_1t, use_cache=True, **cache).logits[0].float().numpy() for step_1t in steps]
    for hook in hooks:
        hook.remove()
    return Trace(np.concatenate(logits), np.stack([np.concatenate(ids) for ids in chosen]), min(gaps))


def greedy_tokens(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The most likely tokens after a prompt, one cached step each."""
    cache = _new_cache(model)
    tokens: list[int] = []
    step_1t = torch.tensor([list(prompt)])
    with torch.inference_mode():
        while len(tokens) < num_tokens:
            tokens.append(int(model(step_1t, use_cache=True, **cache).logits[0, -1].argmax()))
            step_1t = torch.tensor([tokens[-1:]])
    return tokens


def _new_cache(model: PreTrainedModel) -> dict[str, DynamicCache]:
    # Renamed within transformers 5; the old name warns, and warnings are errors here.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}
