"""The trainable model: the project's decoder plus stacked experts, and the losses.

Owns the training form of the routed experts and their dispatch. The dense blocks are `flashmoe_jax.models.decoder`,
as in inference. Invariant: without dropped tokens the forward pass computes what inference computes.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flashmoe_jax.config import Family, ModelConfig, QKNorm
from flashmoe_jax.models.attention import rotary_embedding
from flashmoe_jax.models.decoder import Attention, Decoder, Routing, head_logits

Array = jax.Array
Params = dict[str, Array]

# Queries whose scores are computed together in training.
QUERY_BLOCK = 64


def demo_config(vocab_size: int, **changes) -> ModelConfig:
    """The bundled model's shape; a bfloat16 expert is 73,728 bytes, 18 pages of 4,096."""
    shape = {
        "hidden_size": 192,
        "num_layers": 6,
        "num_heads": 3,
        "num_kv_heads": 3,
        "num_experts": 32,
        "experts_per_token": 4,
        "expert_hidden": 64,
        "max_position": 1024,
        **changes,
    }
    return ModelConfig(
        family=Family.OLMOE,
        vocab_size=vocab_size,
        head_dim=shape["hidden_size"] // shape["num_heads"],
        dense_hidden=shape["expert_hidden"],
        shared_expert_hidden=0,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        qk_norm=QKNorm.FULL,
        clip_qkv=None,
        norm_topk_prob=True,
        qkv_bias=False,
        out_bias=False,
        tie_embeddings=True,
        layer_windows=(None,) * shape["num_layers"],
        moe_layers=tuple(range(shape["num_layers"])),
        weight_dtype="bfloat16",
        **shape,
    )


class ExpertStack(nnx.Module):
    """The experts of one layer, stacked: gate and up projection `[E, F, D]`, down projection `[E, D, F]`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        E, F, D = config.num_experts, config.expert_hidden, config.hidden_size
        self.gate_proj = nnx.Param(jax.random.normal(rngs.params(), (E, F, D)) * D**-0.5)
        self.up_proj = nnx.Param(jax.random.normal(rngs.params(), (E, F, D)) * D**-0.5)
        self.down_proj = nnx.Param(jax.random.normal(rngs.params(), (E, D, F)) * 0.02)

    def __call__(self, x_ECD: Array) -> Array:
        gate_ECF = jnp.einsum("ECD,EFD->ECF", x_ECD, self.gate_proj[...])
        up_ECF = jnp.einsum("ECD,EFD->ECF", x_ECD, self.up_proj[...])
        return jnp.einsum("ECF,EDF->ECD", jax.nn.silu(gate_ECF) * up_ECF, self.down_proj[...])


class TrainableModel(nnx.Module):
    """Decoder and experts in float32."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.decoder = Decoder(config, dtype=jnp.float32, rngs=rngs)
        self.experts = nnx.List([ExpertStack(config, rngs=rngs) for _ in config.moe_layers])


class Forward(NamedTuple):
    """What a forward pass gives: logits `[B, T, V]`, each layer's routing, and the dropped share of assignments."""

    logits: Array
    routings: list[Routing]
    dropped: Array


@jax.custom_vjp
def _take_rows(rows: Array, index: Array, inverse: Array) -> Array:
    """`rows[index]`, zero where the index is out of range. `inverse[i]` lists the places where row i went.

    The gradient of a gather is a scatter, which XLA runs row by row on a CPU; knowing the inverse makes it a gather.
    """
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def _take_rows_forward(rows: Array, index: Array, inverse: Array) -> tuple[Array, Array]:
    return _take_rows(rows, index, inverse), inverse


def _take_rows_backward(inverse: Array, gradient: Array) -> tuple[Array, None, None]:
    flat = gradient.reshape(-1, gradient.shape[-1])
    return jnp.take(flat, inverse, axis=0, mode="fill", fill_value=0).sum(axis=1), None, None


_take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def routed_experts(experts: ExpertStack, x_MD: Array, routing: Routing, capacity: int) -> tuple[Array, Array]:
    """Sum of each token's weighted expert outputs, `[M, D]`, and the number of dropped assignments.

    Each expert takes at most `capacity` tokens, the first ones in batch order; what does not fit contributes zero.
    """
    M, X = routing.expert_id.shape
    E = experts.gate_proj.shape[0]
    expert_id = routing.expert_id.reshape(M * X)
    order = jnp.argsort(expert_id, stable=True)
    load_E = jnp.sum(jax.nn.one_hot(expert_id, E, dtype=jnp.int32), axis=0)
    first_E = jnp.cumsum(load_E) - load_E
    sorted_id = expert_id[order]
    rank = jnp.arange(M * X) - first_E[sorted_id]
    no_place = E * capacity
    sorted_place = jnp.where(rank < capacity, sorted_id * capacity + rank, no_place)
    pair_of_place = jnp.full(no_place, M * X).at[sorted_place].set(order, mode="drop")
    place_of_pair = jnp.zeros(M * X, jnp.int32).at[order].set(sorted_place)
    place_MX = place_of_pair.reshape(M, X)

    x_PD = _take_rows(x_MD, pair_of_place // X, place_MX)
    y_ECD = experts(x_PD.reshape(E, capacity, -1))
    y_MXD = _take_rows(y_ECD.reshape(no_place, -1), place_MX, pair_of_place[:, None])
    dropped = jnp.sum(jnp.maximum(load_E - capacity, 0))
    return jnp.einsum("MXD,MX->MD", y_MXD, routing.weight), dropped


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rotate(x_BTNH: Array, theta: float) -> Array:
    """`rotary_embedding`, whose gradient is the rotation back: derived from the formula it is several times slower."""
    return rotary_embedding(x_BTNH, _positions(x_BTNH), theta)


def _rotate_forward(x_BTNH: Array, theta: float) -> tuple[Array, None]:
    return _rotate(x_BTNH, theta), None


def _rotate_backward(theta: float, _: None, gradient_BTNH: Array) -> tuple[Array]:
    return (rotary_embedding(gradient_BTNH, -_positions(gradient_BTNH), theta),)


def _positions(x_BTNH: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(x_BTNH.shape[1]), x_BTNH.shape[:2])


_rotate.defvjp(_rotate_forward, _rotate_backward)


def causal_attention(attention: Attention, h_BTD: Array) -> Array:
    """`Attention.__call__` of an OLMoE layer without a cache, arranged for training on a CPU.

    Inference computes the scores of every query and key and masks half of them. Here a block of queries meets only
    the keys up to its end, which takes half the time of the forward and backward pass.
    """
    N, K, H = attention.heads
    B, T, _ = h_BTD.shape
    q = attention.q_norm(attention.q_proj(h_BTD)).reshape(B, T, N, H)
    k = attention.k_norm(attention.k_proj(h_BTD)).reshape(B, T, K, H)
    v = attention.v_proj(h_BTD).reshape(B, T, K, H)
    q, k = (_rotate(y, attention.theta) for y in (q, k))

    def by_head(y_BTNH: Array) -> Array:
        # [B, T, N, H] to [B * N, T, H]: one matrix product for each sequence and head.
        return jnp.repeat(y_BTNH, N // y_BTNH.shape[2], axis=2).transpose(0, 2, 1, 3).reshape(B * N, T, H)

    q_GTH, k_GTH, v_GTH = by_head(q * H**-0.5), by_head(k), by_head(v)
    outputs = []
    for start in range(0, T, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, T)
        score_GTS = jnp.einsum("GTH,GSH->GTS", q_GTH[:, start:end], k_GTH[:, :end])
        visible_TS = jnp.arange(end)[None] <= jnp.arange(start, end)[:, None]
        weight_GTS = jax.nn.softmax(jnp.where(visible_TS, score_GTS, -jnp.inf), axis=-1)
        outputs.append(jnp.einsum("GTS,GSH->GTH", weight_GTS, v_GTH[:, :end]))
    out_GTH = jnp.concatenate(outputs, axis=1)
    return attention.o_proj(out_GTH.reshape(B, N, T, H).transpose(0, 2, 1, 3).reshape(B, T, N * H))


def forward(model: TrainableModel, config: ModelConfig, token_BT: Array, capacity_factor: float | None) -> Forward:
    """Full causal forward pass; `capacity_factor` None drops no token."""
    B, T = token_BT.shape
    M = B * T
    balanced = M * config.experts_per_token / config.num_experts
    capacity = M if capacity_factor is None else min(M, math.ceil(capacity_factor * balanced))
    decoder = model.decoder
    x_BTD = decoder.embedder(token_BT)
    routings, dropped = [], jnp.zeros((), jnp.int32)
    for layer, experts in zip(decoder.layers, model.experts, strict=True):
        x_BTD = x_BTD + causal_attention(layer.attention, layer.input_norm(x_BTD))
        h_MD = layer.post_norm(x_BTD).reshape(M, -1)
        routing = layer.router(h_MD)
        y_MD, surplus = routed_experts(experts, h_MD, routing, capacity)
        x_BTD = x_BTD + y_MD.reshape(B, T, -1)
        routings.append(routing)
        dropped += surplus
    head = decoder.embedder.embedding[...] if config.tie_embeddings else decoder.lm_head.kernel[...]
    share = dropped / (M * config.experts_per_token * config.num_layers)
    return Forward(head_logits(decoder.final_norm, head, x_BTD), routings, share)


def token_losses(logits_BTV: Array, target_BT: Array) -> Array:
    """Cross entropy of each target in nats, `[B, T]`."""
    picked = jnp.take_along_axis(logits_BTV, target_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BTV, axis=-1) - picked


def load_balancing_loss(routing: Routing) -> Array:
    """`load_balancing_loss_func` of transformers (Switch Transformer, eq. 4), of one layer.

    transformers applies it to the tokens of all layers at once, which lets a layer be unbalanced if another makes up
    for it; by layer, no expert of any layer dies. 1 x top-k is the balanced value.
    """
    E = routing.logits.shape[-1]
    share_XE = jnp.mean(jax.nn.one_hot(routing.expert_id, E), axis=0)
    probability_E = jnp.mean(jax.nn.softmax(routing.logits, axis=-1), axis=0)
    return E * jnp.sum(share_XE * probability_E)


def router_z_loss(routing: Routing) -> Array:
    """Mean squared log-partition of the router (ST-MoE, eq. 5): keeps its logits small."""
    return jnp.mean(jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)))


def expert_load(expert_id: Array, num_experts: int) -> Array:
    """Share of the assignments that each expert got, `[E]`; they add up to 1."""
    return jnp.mean(jax.nn.one_hot(expert_id.reshape(-1), num_experts), axis=0)


class FlatModel:
    """A `TrainableModel` split once: the structure here, the weights in a flat dict by dotted path."""

    def __init__(self, config: ModelConfig):
        self.config = config
        abstract = nnx.eval_shape(lambda: TrainableModel(config, rngs=nnx.Rngs(0)))
        self._graph, state = nnx.split(abstract)
        leaves, self._tree = jax.tree.flatten(state)
        self.names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        self.shapes = {name: leaf.shape for name, leaf in zip(self.names, leaves, strict=True)}

    def init(self, seed: int) -> Params:
        """Fresh float32 weights."""
        state = nnx.state(TrainableModel(self.config, rngs=nnx.Rngs(seed)))
        return dict(zip(self.names, jax.tree.leaves(state), strict=True))

    def merge(self, params: Params) -> TrainableModel:
        state = jax.tree.unflatten(self._tree, [params[name] for name in self.names])
        return nnx.merge(self._graph, state)

    def num_params(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())
