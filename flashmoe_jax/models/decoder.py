"""One decoder for all families: the dense blocks of a Mixture-of-Experts transformer, as Flax NNX modules.

Owns embedding, attention, norms, routers, shared experts, dense feed-forwards and the head, driven by `ModelConfig`
alone. The routed experts are not here: a layer ends at the router's choice, and whoever holds the experts adds their
outputs to the residual. Reference modules: transformers' modeling_olmoe, modeling_qwen3_moe, modeling_mixtral,
modeling_qwen2_moe. Invariant: matrix products take inputs rounded to the weight's dtype and accumulate in float32;
everything between them (residual stream, norms, softmax, rotary embedding) is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from flashmoe_jax.config import ModelConfig, QKNorm
from flashmoe_jax.models.attention import KVCache, attend, attend_cache, rotary_embedding, write_cache
from flashmoe_jax.models.axes import Array
from flashmoe_jax.numerics import matmul


class Routing(NamedTuple):
    """A router's choice for each token."""

    expert_id: Array  # [..., X] int32, best first
    weight: Array  # [..., X] float32, of the same rank order
    logits: Array  # [..., E] float32


class Linear(nnx.Module):
    """`y = x @ kernel.T + bias`, kernel `[out, in]`; float32 out."""

    def __init__(self, width: int, out: int, *, bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (out, width), dtype) * jnp.asarray(0.02, dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((out,), dtype))
        self.use_bias = bias

    def __call__(self, x: Array) -> Array:
        y = matmul(x, self.kernel[...])
        return y + self.bias[...].astype(jnp.float32) if self.use_bias else y


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(mean_square + self.eps) * self.scale[...].astype(jnp.float32)


class Attention(nnx.Module):
    """Grouped-query attention with the families' norms, biases and clipping."""

    def __init__(self, config: ModelConfig, *, window: int | None, dtype: jnp.dtype, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.heads = (N, K, H)
        self.theta, self.clip, self.window = config.rope_theta, config.clip_qkv, window
        self.norm_heads = config.qk_norm is QKNorm.HEAD
        self.norm_full = config.qk_norm is QKNorm.FULL
        self.q_proj = Linear(D, N * H, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(D, K * H, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(D, K * H, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(N * H, D, bias=config.out_bias, dtype=dtype, rngs=rngs)
        if config.qk_norm is not QKNorm.NONE:
            eps = config.rms_norm_eps
            self.q_norm = RMSNorm(H if self.norm_heads else N * H, eps=eps, dtype=dtype)
            self.k_norm = RMSNorm(H if self.norm_heads else K * H, eps=eps, dtype=dtype)

    def __call__(
        self, h_BTD: Array, position_BT: Array, cache: KVCache | None, attend_length: int | None = None
    ) -> tuple[Array, KVCache | None]:
        """Attends over the cache (after writing to it), or over the tokens themselves where there is none.

        Args:
            h_BTD: normed input.
            position_BT: int32; a position at or past the capacity marks padding, which is not written.
            cache: of this layer, or None: keys are then the T tokens, at positions 0..T-1.
            attend_length: static number of cache positions to look at; None for all.

        Returns:
            float32 `[B, T, D]` and the updated cache.
        """
        N, K, H = self.heads
        q, k, v = self.q_proj(h_BTD), self.k_proj(h_BTD), self.v_proj(h_BTD)
        if self.norm_full:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (jnp.clip(y, -self.clip, self.clip) for y in (q, k, v))
        q_BTNH = q.reshape(*q.shape[:-1], N, H)
        k_BTKH, v_BTKH = (y.reshape(*y.shape[:-1], K, H) for y in (k, v))
        if self.norm_heads:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        dtype = self.q_proj.kernel[...].dtype
        q_BTNH = rotary_embedding(q_BTNH, position_BT, self.theta).astype(dtype)
        k_BTKH = rotary_embedding(k_BTKH, position_BT, self.theta).astype(dtype)
        v_BTKH = v_BTKH.astype(dtype)
        if cache is None:
            out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, position_BT, self.window)
        else:
            cache = write_cache(cache, k_BTKH, v_BTKH, position_BT)
            length = attend_length or cache.k.shape[1]
            out_BTNH = attend_cache(q_BTNH, cache, position_BT, self.window, length, dtype)
        return self.o_proj(out_BTNH.reshape(*h_BTD.shape[:-1], N * H)), cache


class GatedMLP(nnx.Module):
    """SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_proj = Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nnx.Module):
    """Scores the experts of a layer and picks the top k, softmax over all experts before the choice."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(
            jax.random.normal(rngs.params(), (config.num_experts, config.hidden_size), dtype) * jnp.asarray(0.02, dtype)
        )
        self.top_k, self.normalise = config.experts_per_token, config.norm_topk_prob

    def __call__(self, h: Array) -> Routing:
        logits = matmul(h, self.kernel[...])
        weight, expert_id = lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.normalise:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        return Routing(expert_id=expert_id, weight=weight, logits=logits)


class DecoderLayer(nnx.Module):
    """One layer up to the router: attention, norms, and a dense feed-forward or a router (with shared expert)."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        D = config.hidden_size
        self.is_moe = layer in config.moe_layers
        self.has_shared_expert = self.is_moe and config.shared_expert_hidden > 0
        self.input_norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, window=config.layer_windows[layer], dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        if not self.is_moe:
            self.mlp = GatedMLP(D, config.dense_hidden, dtype=dtype, rngs=rngs)
            return
        self.router = Router(config, dtype=dtype, rngs=rngs)
        if self.has_shared_expert:
            self.shared_expert = GatedMLP(D, config.shared_expert_hidden, dtype=dtype, rngs=rngs)
            self.shared_expert_gate = Linear(D, 1, dtype=dtype, rngs=rngs)

    def attend(
        self, x_BTD: Array, position_BT: Array, cache: KVCache | None, attend_length: int | None = None
    ) -> tuple[Array, Array, KVCache | None]:
        """Attention and its residual; returns `x_BTD`, the normed input of the feed-forward, and the cache."""
        out_BTD, cache = self.attention(self.input_norm(x_BTD), position_BT, cache, attend_length)
        x_BTD = x_BTD + out_BTD
        return x_BTD, self.post_norm(x_BTD), cache

    def dense_output(self, h: Array) -> Array | None:
        """What the feed-forward adds besides routed experts: the dense MLP, the gated shared expert, or None."""
        if not self.is_moe:
            return self.mlp(h)
        if self.has_shared_expert:
            return jax.nn.sigmoid(self.shared_expert_gate(h)) * self.shared_expert(h)
        return None


class Embedder(nnx.Module):
    """Token embedding; also the head where embeddings are tied."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(0.02, dtype))

    def __call__(self, token: Array) -> Array:
        return jnp.take(self.embedding[...], token, axis=0).astype(jnp.float32)


class Decoder(nnx.Module):
    """The dense weights of a whole model. Paths of its state are those of `weights.dense_weight_specs`."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embedder = Embedder(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)]
        )
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)


def head_logits(final_norm: RMSNorm, kernel_VD: Array, x: Array) -> Array:
    """Logits `[..., V]` in float32 from the last layer's residual `[..., D]`."""
    return matmul(final_norm(x), kernel_VD)
