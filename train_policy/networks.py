"""The eviction networks as they are trained: Flax modules in float32, all MoE layers of a model side by side.

Owns the networks' parameters and their float arithmetic; how they are rounded to whole numbers and scored is
`flashmoe_jax/policy`'s. Every module gives keep values, the higher the longer an expert should stay, of M heads:
`[L, B, M, E]`. Invariant: `weights` and the `peaks` of activations are the arrays of `SavedPolicy`, which mean the same
but for rounding and the cut at the peaks.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from flashmoe_jax.policy.base import PolicyShape
from flashmoe_jax.policy.context import seen_columns
from flashmoe_jax.policy.history import MAX_INPUT, OWN_FEATURES
from flashmoe_jax.policy.learned import PAPER_MAX_INPUT, paper_width
from flashmoe_jax.policy.shared import SHARED_WIDTH

# Activations are cut off where all but this share of them end: 255 steps must do for the rest.
_PEAK_QUANTILE = 0.9998
_OWN_UNITS = 16  # of the part of a context network that treats all experts alike
_VECTORS = ("upward", "downward")
HIDDEN_OFFSET = 128  # hidden states, -127 to 127, are kept as bytes like all other inputs
PAPER_HIDDEN = {"expert": 128, "layer": 64}  # units of the hidden layers, by shape


class ContextBatch(NamedTuple):
    """What a context network sees of B steps, whole numbers."""

    own: Array  # [L, B, F] as `history.own_inputs`, hidden states with HIDDEN_OFFSET
    used: Array  # [B, L, E] 1 = chosen in this step
    used_before: Array  # [B, L, E] 1 = chosen in the step before


class Masks(NamedTuple):
    """What a training step multiplies its inputs by: 0 leaves one out."""

    own: Array  # [B, F] the same for every layer; an expert's own network sees its features all the same
    used: Array  # [B, L, E]
    used_before: Array  # [B, L, E]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextSize:
    """Sizes of a context network beside the model's."""

    inputs: frozenset[str]  # beside ids
    hidden_units: int
    num_heads: int


class ContextNetwork(nnx.Module):
    """One network per layer over the whole layer; the vectors of chosen experts are shared by all layers that look.

    Args:
        model: whose layers these are.
        size: of the network.
        first_guess: keep value before training.
        random: of the initial weights.
    """

    def __init__(self, model: PolicyShape, size: ContextSize, first_guess: float, *, random: np.random.Generator):
        L, E, H, M, K, J = (
            model.num_layers,
            model.num_experts,
            size.hidden_units,
            size.num_heads,
            OWN_FEATURES,
            _OWN_UNITS,
        )
        self.model, self.inputs = model, size.inputs
        # Of all layers' sets L·k entries are 1; own inputs are mostly well below 1.
        set_scale = 0.5 * (2 / (L * model.top_k)) ** 0.5
        self.upward = _normal(random, (L, E, H), set_scale)
        self.downward = _normal(random, (L, E, H), set_scale)
        seen_width = len(self.seen)
        self.first_kernel = _normal(random, (L, H, seen_width), (2 / (seen_width + L * E)) ** 0.5)
        self.first_bias = nnx.Param(jnp.zeros((L, H)))
        self.second_kernel = _normal(random, (L, H, H), (2 / H) ** 0.5)
        self.second_bias = nnx.Param(jnp.zeros((L, H)))
        self.last_kernel = _normal(random, (L, M, E, H), 0.3 / H**0.5)
        self.last_bias = nnx.Param(jnp.full((L, M, E), first_guess))
        self.own = nnx.Param(jnp.zeros((L, M, K)))
        self.own_kernel = _normal(random, (L, J, K), (2 / K) ** 0.5)
        self.own_bias = _normal(random, (L, J), 0.1)
        self.own_last = nnx.Param(jnp.zeros((L, M, J)))

    @property
    def seen(self) -> np.ndarray:
        """Places of the own inputs that a layer's network sees."""
        return seen_columns(self.model, self.inputs)

    def __call__(self, batch: ContextBatch, masks: Masks | None = None) -> Array:
        """Keep values `[L, B, M, E]`."""
        # A layer at a time, computed again for its gradient: what lies between stays in the processor's cache.
        return self._by_layer(jax.checkpoint(self._keep), batch, masks)

    def peaked(self, batch: ContextBatch) -> dict[str, Array]:
        """Activations `[L, ...]`, by the name of their peak."""
        return self._by_layer(self._activations, batch, None)

    def weights(self) -> dict[str, np.ndarray]:
        """Weights by name."""
        return {name: np.asarray(p[...]) for name, p in vars(self).items() if isinstance(p, nnx.Param)}

    def _by_layer(self, function: Callable[..., Any], batch: ContextBatch, masks: Masks | None) -> Any:
        own_mask = None if masks is None else masks.own[:, self.seen]
        per_layer = {
            name: p[...] for name, p in vars(self).items() if isinstance(p, nnx.Param) and name not in _VECTORS
        }
        return lax.map(lambda x: function(*x, own_mask), (per_layer, batch.own, self._sets(batch, masks)))

    def _sets(self, batch: ContextBatch, masks: Masks | None) -> Array:
        """Sum of the vectors of all layers' sets as each layer sees them, `[L, B, H]`."""
        used, before = batch.used.astype(jnp.float32), batch.used_before.astype(jnp.float32)
        if masks is not None:
            used, before = used * masks.used, before * masks.used_before
        up = jnp.einsum("ble,leh->lbh", used, self.upward[...])
        down = jnp.einsum("ble,leh->lbh", before, self.downward[...])
        # The sets up to a layer are this step's, those above it the step before's. A product sums far faster than
        # XLA's cumulative sum does on a CPU.
        is_up_to = np.tri(len(up), dtype=np.float32)
        return jnp.einsum("ml,lbh->mbh", is_up_to, up) + jnp.einsum("ml,lbh->mbh", 1 - is_up_to, down)

    def _keep(self, weights: dict[str, Array], own: Array, sets: Array, own_mask: Array | None) -> Array:
        """Keep values `[B, M, E]` of a layer."""
        activations = self._activations(weights, own, sets, own_mask)
        of_own, own_KN = activations["own_peak"], self._own_features(own)
        B, (M, E, H) = len(own), weights["last_kernel"].shape
        alike = weights["own"] @ own_KN + weights["own_last"] @ of_own
        # [M, E] merged: all heads in one product.
        keep = activations["second_peak"] @ weights["last_kernel"].reshape(M * E, H).T
        return keep.reshape(B, M, E) + weights["last_bias"] + jnp.swapaxes(alike.reshape(M, B, E), 0, 1)

    def _activations(
        self, weights: dict[str, Array], own: Array, sets: Array, own_mask: Array | None
    ) -> dict[str, Array]:
        """Of a layer, by the name of their peak: `[B, H]` twice and `[J, N]`."""
        seen = own[:, self.seen].astype(jnp.float32)
        if self.model.hidden_size:
            seen = seen - np.where(self.seen < own.shape[1] - self.model.hidden_size, 0, HIDDEN_OFFSET)
        seen = seen * (1 / MAX_INPUT)
        if own_mask is not None:
            seen = seen * own_mask
        h1 = jax.nn.relu(seen @ weights["first_kernel"].T + sets + weights["first_bias"])
        h2 = jax.nn.relu(h1 @ weights["second_kernel"].T + weights["second_bias"])
        of_own = jax.nn.relu(weights["own_kernel"] @ self._own_features(own) + weights["own_bias"][:, None])
        return {"first_peak": h1, "second_peak": h2, "own_peak": of_own}

    def _own_features(self, own: Array) -> Array:
        """Features `[K, N]` of every expert, from 0 to 1, with the steps and experts of `[B, E]` merged to N."""
        counts = own[:, : OWN_FEATURES * self.model.num_experts].astype(jnp.float32) * (1 / MAX_INPUT)
        return jnp.swapaxes(counts.reshape(len(own), OWN_FEATURES, -1), 0, 1).reshape(OWN_FEATURES, -1)


class AffineNetwork(nnx.Module):
    """Affine layers with an activation between them, one network for each of L MoE layers."""

    def __init__(self, num_layers: int, widths: tuple[int, ...], activation: str, *, random: np.random.Generator):
        pairs = list(itertools.pairwise(widths))
        self.kernel = nnx.List([_normal(random, (num_layers, n, f), (1 / f) ** 0.5) for f, n in pairs])
        self.bias = nnx.List([nnx.Param(jnp.zeros((num_layers, n))) for _, n in pairs])
        self.activation = activation

    def affine(self, x: Array) -> tuple[Array, list[Array]]:
        """Inputs `[L, N, F]` to the outputs of the last layer, and the activations of the others."""
        hidden: list[Array] = []
        for kernel, bias in zip(self.kernel, self.bias, strict=True):
            z = jnp.einsum("lnf,lhf->lnh", hidden[-1] if hidden else x, kernel[...]) + bias[:, None]
            hidden.append(jax.nn.silu(z) if self.activation == "silu" else jax.nn.relu(z))
        return z, hidden[:-1]

    def peaked(self, inputs: Array) -> dict[str, Array]:
        """Activations' magnitudes `[L, ...]`, by the name of their peak."""
        return {f"peak{i}": jnp.abs(h) for i, h in enumerate(self.affine(self.rows(inputs))[1])}

    def weights(self) -> dict[str, np.ndarray]:
        """Weights by name."""
        kernels = {f"kernel{i}": np.asarray(p[...]) for i, p in enumerate(self.kernel)}
        return kernels | {f"bias{i}": np.asarray(p[...]) for i, p in enumerate(self.bias)}

    def rows(self, inputs: Array) -> Array:
        """Inputs of the policy as those of the networks, `[L, N, F]` from 0 to 1."""
        raise NotImplementedError


class PaperNetwork(AffineNetwork):
    """FlashMoE's (arXiv 2601.17063): from recency and frequency to the distance of the next use.

    Args:
        model: whose layers these are.
        shape: "expert" for 2 → 128 → 128 → 1 per expert, "layer" for 2E → 64 → 64 → E.
        random: of the initial weights.
    """

    def __init__(self, model: PolicyShape, shape: str, *, random: np.random.Generator):
        hidden, outputs = PAPER_HIDDEN[shape], 1 if shape == "expert" else model.num_experts
        super().__init__(model.num_layers, (paper_width(shape, model), hidden, hidden, outputs), "silu", random=random)
        self.shape = shape

    def __call__(self, inputs: Array) -> Array:
        """Inputs `[L, B, 2, E]`, whole numbers, to `[L, B, 1, E]`."""
        L, B, _, E = inputs.shape
        return -self.affine(self.rows(inputs))[0].reshape(L, B, 1, E)

    def rows(self, inputs: Array) -> Array:
        """See AffineNetwork."""
        L, B, _, E = inputs.shape
        x = inputs.astype(jnp.float32) * (1 / PAPER_MAX_INPUT)
        if self.shape == "layer":
            return x.reshape(L, B, 2 * E)
        return jnp.swapaxes(x, 2, 3).reshape(L, B * E, 2)  # [B, E] merged: an expert is a row


class SharedNetwork(AffineNetwork):
    """One network for the experts of every layer of every model."""

    def __init__(self, hidden_units: int, *, random: np.random.Generator):
        widths = (SHARED_WIDTH, hidden_units, hidden_units, 1) if hidden_units else (SHARED_WIDTH, 1)
        super().__init__(1, widths, "relu", random=random)

    def __call__(self, inputs: Array) -> Array:
        """Inputs `[L, B, E, SHARED_WIDTH]`, whole numbers, to `[L, B, 1, E]`."""
        L, B, E, _ = inputs.shape
        return self.affine(self.rows(inputs))[0].reshape(L, B, 1, E)

    def rows(self, inputs: Array) -> Array:
        """See AffineNetwork."""
        x = inputs.astype(jnp.float32) * (1 / MAX_INPUT)
        return x.reshape(1, -1, SHARED_WIDTH)  # layers, steps and experts merged


def is_decayed(path: tuple[Any, ...], _: Array) -> bool:
    """Whether weight decay holds for the parameter at `path`: kernels and vectors, not biases nor `own`."""
    name = str(getattr(path[0], "key", path[0]))
    return "bias" not in name and name != "own"


def _normal(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> nnx.Param:
    return nnx.Param(jnp.asarray(random.normal(0, scale, shape), jnp.float32))


def peaks(activation: np.ndarray) -> np.ndarray:
    """Where activations `[L, ...]` are cut off, per layer; above 0."""
    flat = activation.reshape(len(activation), -1)
    return np.maximum(np.quantile(flat, _PEAK_QUANTILE, axis=1), 1e-3).astype(np.float32)
