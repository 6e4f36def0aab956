"""The eviction networks as they are trained: Flax modules in float32, all MoE layers of a model side by side.

Owns the networks' parameters and their float arithmetic; how they are rounded to whole numbers and scored is
`flashmoe_jax/policy`'s. Every module gives keep values, the higher the longer an expert should stay, of M heads:
`[L, B, M, E]`. Invariant: a module's `arrays` are those of `SavedPolicy`, so that what is trained is what is saved; but
for rounding and the cut at the peaks they mean the same.
"""

import dataclasses
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
        rngs: of the initial weights.
    """

    def __init__(self, model: PolicyShape, size: ContextSize, first_guess: float, *, rngs: nnx.Rngs):
        L, E, H, M = model.num_layers, model.num_experts, size.hidden_units, size.num_heads
        # Of all layers' sets L·k entries are 1; own inputs are mostly well below 1.
        set_scale = 0.5 * (2 / (L * model.top_k)) ** 0.5
        self.upward = _normal(rngs, (L, E, H), set_scale)
        self.downward = _normal(rngs, (L, E, H), set_scale)
        self.first_kernel = _normal(rngs, (L, H, size.own_width), (2 / (size.own_width + L * E)) ** 0.5)
        self.first_bias = nnx.Param(jnp.zeros((L, H)))
        self.second_kernel = _normal(rngs, (L, H, H), (2 / H) ** 0.5)
        self.second_bias = nnx.Param(jnp.zeros((L, H)))
        self.last_kernel = _normal(rngs, (L, M, E, H), 0.3 / H**0.5)
        self.last_bias = nnx.Param(jnp.full((L, M, E), first_guess))
        self.own = nnx.Param(jnp.zeros((L, M, len(SHIFTS))))

    def __call__(self, batch: ContextBatch, masks: Masks | None = None) -> Array:
        """Keep values `[L, B, M, E]`."""
        _, h2 = self.activations(batch, masks)
        L, M, E, H = self.last_kernel.shape
        # [M, E] merged: all heads in one product.
        keep = jnp.einsum("lbh,lnh->lbn", h2, self.last_kernel[...].reshape(L, M * E, H))
        counts = batch.own[..., : len(SHIFTS) * E].reshape(L, -1, len(SHIFTS), E)
        keep = keep.reshape(L, -1, M, E) + self.last_bias[:, None]
        return keep + jnp.einsum("lbke,lmk->lbme", counts, self.own[...])

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

    def arrays(self, batch: ContextBatch) -> dict[str, np.ndarray]:
        """Weights by name, with the peaks of the activations that `batch` makes."""
        h1, h2 = self.activations(batch)
        weights = {name: np.asarray(p[...]) for name, p in vars(self).items() if isinstance(p, nnx.Param)}
        return weights | {"first_peak": _peaks(h1), "second_peak": _peaks(h2)}


class AffineNetwork(nnx.Module):
    """Affine layers with an activation between them, one network for each of L MoE layers."""

    def __init__(self, num_layers: int, widths: tuple[int, ...], activation: str, *, rngs: nnx.Rngs):
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        self.kernel = nnx.List([_normal(rngs, (num_layers, n, f), (1 / f) ** 0.5) for f, n in pairs])
        self.bias = nnx.List([nnx.Param(jnp.zeros((num_layers, n))) for _, n in pairs])
        self.activation = activation

    def affine(self, x: Array) -> tuple[Array, list[Array]]:
        """Inputs `[L, N, F]` to the outputs of the last layer, and the activations of the others."""
        hidden: list[Array] = []
        for kernel, bias in zip(self.kernel, self.bias, strict=True):
            z = jnp.einsum("lnf,lhf->lnh", hidden[-1] if hidden else x, kernel[...]) + bias[:, None]
            hidden.append(jax.nn.silu(z) if self.activation == "silu" else jax.nn.relu(z))
        return z, hidden[:-1]

    def weights(self, x: Array) -> dict[str, np.ndarray]:
        """Weights by name, with the peaks of the activations that `x` makes."""
        result = {f"peak{i}": _peaks(jnp.abs(h)) for i, h in enumerate(self.affine(x)[1])}
        for i, (kernel, bias) in enumerate(zip(self.kernel, self.bias, strict=True)):
            result |= {f"kernel{i}": np.asarray(kernel[...]), f"bias{i}": np.asarray(bias[...])}
        return result


class PaperNetwork(AffineNetwork):
    """FlashMoE's (arXiv 2601.17063): from recency and frequency to the distance of the next use.

    Args:
        model: whose layers these are.
        shape: "expert" for 2 → 128 → 128 → 1 per expert, "layer" for 2E → 64 → 64 → E.
        rngs: of the initial weights.
    """

    def __init__(self, model: PolicyShape, shape: str, *, rngs: nnx.Rngs):
        hidden, outputs = PAPER_HIDDEN[shape], 1 if shape == "expert" else model.num_experts
        super().__init__(model.num_layers, (paper_width(shape, model), hidden, hidden, outputs), "silu", rngs=rngs)
        self.shape = shape

    def __call__(self, inputs: Array) -> Array:
        """`[L, B, 2, E]` from 0 to 1, to `[L, B, 1, E]`."""
        L, B, _, E = inputs.shape
        return -self.affine(self._rows(inputs))[0].reshape(L, B, 1, E)

    def arrays(self, inputs: Array) -> dict[str, np.ndarray]:
        """Weights by name, with the peaks of the activations that `inputs` make."""
        return self.weights(self._rows(inputs))

    def _rows(self, inputs: Array) -> Array:
        L, B, _, E = inputs.shape
        if self.shape == "layer":
            return inputs.reshape(L, B, 2 * E)
        return jnp.swapaxes(inputs, 2, 3).reshape(L, B * E, 2)  # [B, E] merged: an expert is a row


class SharedNetwork(AffineNetwork):
    """One network for the experts of every layer of every model."""

    def __init__(self, hidden_units: int, *, rngs: nnx.Rngs):
        super().__init__(1, (SHARED_WIDTH, hidden_units, hidden_units, 1), "relu", rngs=rngs)

    def __call__(self, inputs: Array) -> Array:
        """`[L, B, E, SHARED_WIDTH]` from 0 to 1, to `[L, B, 1, E]`."""
        L, B, E, _ = inputs.shape
        return self.affine(self._rows(inputs))[0].reshape(L, B, 1, E)

    def arrays(self, inputs: Array) -> dict[str, np.ndarray]:
        """Weights by name, with the peaks of the activations that `inputs` make."""
        return self.weights(self._rows(inputs))

    def _rows(self, inputs: Array) -> Array:
        return inputs.reshape(1, -1, SHARED_WIDTH)  # layers, steps and experts merged


def is_decayed(path: tuple[Any, ...], _: Array) -> bool:
    """Whether weight decay holds for the parameter at `path`: kernels and vectors, not biases nor `own`."""
    name = str(getattr(path[0], "key", path[0]))
    return "bias" not in name and name != "own"


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> nnx.Param:
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32))


def _peaks(activation: Array) -> np.ndarray:
    """Of every layer of `[L, ...]`; above 0."""
    flat = np.asarray(activation).reshape(len(activation), -1)
    return np.maximum(np.quantile(flat, _PEAK_QUANTILE, axis=1), 1e-3).astype(np.float32)
