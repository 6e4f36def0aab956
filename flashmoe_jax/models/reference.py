"""The readable specification of a whole model: one forward pass over a sequence, with every expert in memory.

Owns the joining of the decoder's dense blocks and the routed experts, written for reading and for tests: no cache, no
store, no compilation of its own. It follows the numeric rules of `decoder.py`, yet it is not the engine's twin bit by
bit, because the last bits of a product depend on the shapes it is computed in. Invariant: each expert's output is
kept apart and added in router-rank order, so the sum does not depend on the order in which experts are visited.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flashmoe_jax.config import ModelConfig
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.models.axes import Array
from flashmoe_jax.models.decoder import Decoder, DecoderLayer, Routing, head_logits, matmul
from flashmoe_jax.models.weights import dense_weight_specs

# gate_proj [F, D], up_proj [F, D], down_proj [D, F]; a model's experts are indexed [moe_layer][expert].
Expert = Mapping[str, Array]
Experts = Sequence[Sequence[Expert]]


class Reference(NamedTuple):
    """What a forward pass gives: float32 logits, and the choice of each MoE layer in order."""

    logits_BTV: Array
    routing: tuple[Routing, ...]


def reference_forward(config: ModelConfig, dense: Mapping[str, Array], experts: Experts, token_BT: Array) -> Reference:
    """Logits of every position, and which experts each was routed to.

    Attention is causal, so a batch of unequal lengths is padded on the right with any token and the padded
    positions of the result are ignored.

    Args:
        config: of the model.
        dense: the weights of `dense_weight_specs`, by path.
        experts: of every MoE layer.
        token_BT: int32 token ids.

    Raises:
        CheckpointError: `dense` is not the set of weights that the config describes.
    """
    decoder = decoder_from_weights(config, dense)
    position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
    x_BTD = decoder.embedder(token_BT)
    routing: list[Routing] = []
    for layer_id, layer in enumerate(decoder.layers):
        x_BTD, h_BTD, _ = layer.attend(x_BTD, position_BT, cache=None)
        layer_experts = experts[config.moe_layer_id[layer_id]] if layer.is_moe else ()
        y_BTD, choice = feed_forward(layer, layer_experts, h_BTD)
        x_BTD = x_BTD + y_BTD
        routing += [choice] if choice is not None else []
    return Reference(head_logits(decoder.final_norm, head_kernel(decoder), x_BTD), tuple(routing))


def decoder_from_weights(config: ModelConfig, dense: Mapping[str, Array]) -> Decoder:
    """The decoder that holds the given weights.

    Raises:
        CheckpointError: a weight is missing, unknown, or of another shape than the config says.
    """
    specs = dense_weight_specs(config)
    if odd := sorted(set(specs) ^ set(dense)):
        raise CheckpointError(f"dense weights are missing or unknown: {', '.join(odd)}")
    for path, spec in specs.items():
        if tuple(dense[path].shape) != spec.shape:
            raise CheckpointError(f"{path} has shape {tuple(dense[path].shape)}; the config needs {spec.shape}")
    dtype = jnp.dtype(config.weight_dtype)
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    leaves = [
        (path, leaf.replace(jnp.asarray(dense[".".join(map(str, path))]))) for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def head_kernel(decoder: Decoder) -> Array:
    """The `[V, D]` kernel of the head: the embedding itself where they are tied."""
    return decoder.lm_head.kernel[...] if hasattr(decoder, "lm_head") else decoder.embedder.embedding[...]


def feed_forward(layer: DecoderLayer, experts: Sequence[Expert], h_BTD: Array) -> tuple[Array, Routing | None]:
    """What a layer adds to the residual after attention, and the router's choice where it has one."""
    if not layer.is_moe:
        return layer.mlp(h_BTD), None
    choice = layer.router(h_BTD)
    routed_BTD = routed_output(h_BTD, choice, experts)
    shared_BTD = layer.dense_output(h_BTD)
    return routed_BTD if shared_BTD is None else routed_BTD + shared_BTD, choice


def routed_output(h_BTD: Array, choice: Routing, experts: Sequence[Expert]) -> Array:
    """Weighted sum of the chosen experts' outputs, in router-rank order; float32 `[B, T, D]`.

    Every expert sees every token and the unchosen outputs are dropped, which keeps the shapes fixed.
    """
    out_BTXD = jnp.zeros((*choice.expert_id.shape, h_BTD.shape[-1]), jnp.float32)
    for expert_id, expert in enumerate(experts):
        is_chosen_BTX = choice.expert_id == expert_id
        out_BTXD = jnp.where(is_chosen_BTX[..., None], expert_output(h_BTD, expert)[..., None, :], out_BTXD)
    routed_BTD = jnp.zeros(h_BTD.shape, jnp.float32)
    for rank in range(choice.expert_id.shape[-1]):
        routed_BTD = routed_BTD + choice.weight[..., rank, None] * out_BTXD[..., rank, :]
    return routed_BTD


def expert_output(h: Array, expert: Expert) -> Array:
    """`down(silu(gate(h)) * up(h))` of one expert; float32 `[..., D]`."""
    gated = jax.nn.silu(matmul(h, expert["gate_proj"])) * matmul(h, expert["up_proj"])
    return matmul(gated, expert["down_proj"])
