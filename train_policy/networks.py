"""The eviction networks as they are trained: Flax modules in float32, all MoE layers of a model side by side.

Owns the networks' parameters and their float arithmetic; how they are rounded to whole numbers and scored is
`flashmoe_jax/policy`'s. Every module gives keep values, the higher the longer an expert should stay, of M heads:
`[L, B, M, E]`. Invariant: `weights` and the `peaks` of activations are the arrays of `SavedPolicy`, which mean the same
but for rounding and the cut at the peaks.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from flashmoe_jax.policy.base import PolicyShape
from flashmoe_jax.policy.history import SHIFTS
from flashmoe_jax.policy.learned import SHARED_WIDTH, paper_width

# Activations are cut off where all but this share of them end: 255 steps must do for the rest.
_PEAK_QUANTILE = 0.9998
_OWN_UNITS = 16  # of the part of a context network that treats all experts alike
PAPER_HIDDEN = {"expert": 128, "layer": 64}  # units of the hidden layers, by shape


class ContextBatch(NamedTuple):
    """What a context network sees of B steps, float32."""

    own: Array  # [L, B, F] from 0 to 1; hidden states from -1 to 1
    used: Array  # [B, L, E] 1 = chosen in this step
    used_before: Array  # [B, L, E] 1 = chosen in the step before


class Masks(NamedTuple):
    """What a training step multiplies its inputs by: 0 leaves one out."""

    own: Array  # [B, F], the same for every layer
    used: Array  # [B, L, E]
    used_before: Array  # [B, L, E]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextSize:
    """Sizes of a context network beside the model's."""

    own_width: int
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
        L, E, H, M = model.num_layers, model.num_experts, size.hidden_units, size.num_heads
        # Of all layers' sets L·k entries are 1; own inputs are mostly well below 1.
        set_scale = 0.5 * (2 / (L * model.top_k)) ** 0.5
        self.upward = _normal(random, (L, E, H), set_scale)
        self.downward = _normal(random, (L, E, H), set_scale)
        self.first_kernel = _normal(random, (L, H, size.own_width), (2 / (size.own_width + L * E)) ** 0.5)
        self.first_bias = nnx.Param(jnp.zeros((L, H)))
        self.second_kernel = _normal(random, (L, H, H), (2 / H) ** 0.5)
        self.second_bias = nnx.Param(jnp.zeros((L, H)))
        self.last_kernel = _normal(random, (L, M, E, H), 0.3 / H**0.5)
        self.last_bias = nnx.Param(jnp.full((L, M, E), first_guess))
        K, J = len(SHIFTS), _OWN_UNITS
        self.own = nnx.Param(jnp.zeros((L, M, K)))
        self.own_kernel = _normal(random, (L, J, K), (2 / K) ** 0.5)
        self.own_bias = _normal(random, (L, J), 0.1)
        self.own_last = nnx.Param(jnp.zeros((L, M, J)))

    def __call__(self, batch: ContextBatch, masks: Masks | None = None) -> Array:
        """Keep values `[L, B, M, E]`."""
        _, h2 = self.activations(batch, masks)
        L, M, E, H = self.last_kernel.shape
        # [M, E] merged: all heads in one product.
        keep = jnp.einsum("lbh,lnh->lbn", h2, self.last_kernel[...].reshape(L, M * E, H))
        counts = batch.own[..., : len(SHIFTS) * E].reshape(L, -1, len(SHIFTS), E)
        keep = keep.reshape(L, -1, M, E) + self.last_bias[:, None]
        of_counts = self.of_counts(counts)
        return (
            keep
            + jnp.einsum("lbke,lmk->lbme", counts, self.own[...])
            + jnp.einsum("lbje,lmj->lbme", of_counts, self.own_last[...])
        )

    def of_counts(self, counts_LBKE: Array) -> Array:
        """Activations `[L, B, J, E]` that every expert's own counts make, alike for all experts."""
        sums = jnp.einsum("lbke,ljk->lbje", counts_LBKE, self.own_kernel[...])
        return jax.nn.relu(sums + self.own_bias[:, None, :, None])

    def activations(self, batch: ContextBatch, masks: Masks | None = None) -> tuple[Array, Array]:
        """Of both hidden layers, `[L, B, H]`."""
        own, used, before = batch
        if masks is not None:
            own, used, before = own * masks.own, used * masks.used, before * masks.used_before
        up = jnp.einsum("ble,leh->lbh", used, self.upward[...])
        down = jnp.einsum("ble,leh->lbh", before, self.downward[...])
        # The sets up to a layer are this step's, those above it the step before's.
        sets = jnp.cumsum(up, axis=0) + jnp.sum(down, axis=0) - jnp.cumsum(down, axis=0)
        first = jnp.einsum("lbf,lhf->lbh", own, self.first_kernel[...]) + sets
        h1 = jax.nn.relu(first + self.first_bias[:, None])
        h2 = jnp.einsum("lbh,ljh->lbj", h1, self.second_kernel[...])
        return h1, jax.nn.relu(h2 + self.second_bias[:, None])

    def peaked(self, batch: ContextBatch) -> dict[str, Array]:
        """Activations `[L, ...]`, by the name of their peak."""
        h1, h2 = self.activations(batch)
        L, _, E, _ = self.last_kernel.shape
        counts = batch.own[..., : len(SHIFTS) * E].reshape(L, -1, len(SHIFTS), E)
        return {"first_peak": h1, "second_peak": h2, "own_peak": self.of_counts(counts)}

    def weights(self) -> dict[str, np.ndarray]:
        """Weights by name."""
        return {name: np.asarray(p[...]) for name, p in vars(self).items() if isinstance(p, nnx.Param)}


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
        """Inputs of the policy as inputs of the networks, `[L, N, F]`."""
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
        """`[L, B, 2, E]` from 0 to 1, to `[L, B, 1, E]`."""
        L, B, _, E = inputs.shape
        return -self.affine(self.rows(inputs))[0].reshape(L, B, 1, E)

    def rows(self, inputs: Array) -> Array:
        """See AffineNetwork."""
        L, B, _, E = inputs.shape
        if self.shape == "layer":
            return inputs.reshape(L, B, 2 * E)
        return jnp.swapaxes(inputs, 2, 3).reshape(L, B * E, 2)  # [B, E] merged: an expert is a row


class SharedNetwork(AffineNetwork):
    """One network for the experts of every layer of every model."""

    def __init__(self, hidden_units: int, *, random: np.random.Generator):
        super().__init__(1, (SHARED_WIDTH, hidden_units, hidden_units, 1), "relu", random=random)

    def __call__(self, inputs: Array) -> Array:
        """`[L, B, E, SHARED_WIDTH]` from 0 to 1, to `[L, B, 1, E]`."""
        L, B, E, _ = inputs.shape
        return self.affine(self.rows(inputs))[0].reshape(L, B, 1, E)

    def rows(self, inputs: Array) -> Array:
        """See AffineNetwork."""
        return inputs.reshape(1, -1, SHARED_WIDTH)  # layers, steps and experts merged


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
