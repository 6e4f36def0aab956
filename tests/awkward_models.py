"""Models whose shapes and options leave the beaten path, by name; each is a tiny config.json.

Every option that changes the maths is on in at least one of them, with a value that matters at these sizes: a clip
that clips, a window shorter than the prompt, biases, heads of another width than hidden_size / heads.
"""

from typing import Any

from tiny_models import tiny_hf_config

from flashmoe_jax.config import Family

AWKWARD: dict[str, dict[str, Any]] = {
    "olmoe": tiny_hf_config(Family.OLMOE),
    "olmoe-1layer-1kv-clip-bias": tiny_hf_config(
        Family.OLMOE,
        num_hidden_layers=1,
        hidden_size=36,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=7,
        clip_qkv=0.6,
        attention_bias=True,
    ),
    "olmoe-odd-normalised": tiny_hf_config(
        Family.OLMOE,
        hidden_size=30,
        num_attention_heads=5,
        num_key_value_heads=5,
        intermediate_size=33,
        norm_topk_prob=True,
        clip_qkv=1.0,
        rope_theta=500.0,
    ),
    "olmoe-tied-all-experts": tiny_hf_config(
        Family.OLMOE, tie_word_embeddings=True, num_experts_per_tok=5, rms_norm_eps=1e-2
    ),
    "qwen3_moe": tiny_hf_config(Family.QWEN3_MOE),
    "qwen3_moe-1layer-1kv-odd-head": tiny_hf_config(
        Family.QWEN3_MOE,
        num_hidden_layers=1,
        num_key_value_heads=1,
        head_dim=10,
        moe_intermediate_size=33,
        norm_topk_prob=False,
    ),
    "qwen3_moe-bias-tied": tiny_hf_config(
        Family.QWEN3_MOE,
        hidden_size=18,
        num_attention_heads=3,
        num_key_value_heads=3,
        attention_bias=True,
        head_dim=14,
        moe_intermediate_size=7,
        tie_word_embeddings=True,
    ),
    "qwen3_moe-window": tiny_hf_config(
        Family.QWEN3_MOE, use_sliding_window=True, sliding_window=5, num_key_value_heads=1
    ),
    "qwen3_moe-sparse-step": tiny_hf_config(Family.QWEN3_MOE, decoder_sparse_step=2, intermediate_size=11),
    "qwen3_moe-dense-first": tiny_hf_config(
        Family.QWEN3_MOE, mlp_only_layers=[0], norm_topk_prob=False, num_experts=9, num_experts_per_tok=4
    ),
    "mixtral": tiny_hf_config(Family.MIXTRAL),
    "mixtral-1layer-1kv-top1": tiny_hf_config(
        Family.MIXTRAL, num_hidden_layers=1, num_key_value_heads=1, intermediate_size=7, num_experts_per_tok=1
    ),
    "mixtral-odd-head-tied": tiny_hf_config(
        Family.MIXTRAL, hidden_size=26, head_dim=10, intermediate_size=33, tie_word_embeddings=True, rope_theta=1e6
    ),
    "mixtral-window": tiny_hf_config(
        Family.MIXTRAL, sliding_window=5, hidden_size=20, num_attention_heads=2, num_key_value_heads=1
    ),
    # A window of 1 is left to the attention tests: the cache of transformers keeps every key for it.
    "mixtral-window-2": tiny_hf_config(Family.MIXTRAL, sliding_window=2),
    "qwen2_moe": tiny_hf_config(Family.QWEN2_MOE),
    "qwen2_moe-1layer-1kv-no-bias": tiny_hf_config(
        Family.QWEN2_MOE,
        num_hidden_layers=1,
        num_key_value_heads=1,
        qkv_bias=False,
        norm_topk_prob=True,
        moe_intermediate_size=7,
        shared_expert_intermediate_size=33,
    ),
    "qwen2_moe-odd-head-tied": tiny_hf_config(
        Family.QWEN2_MOE,
        hidden_size=22,
        head_dim=6,
        moe_intermediate_size=33,
        shared_expert_intermediate_size=9,
        tie_word_embeddings=True,
    ),
    "qwen2_moe-window-every-other-layer": tiny_hf_config(
        Family.QWEN2_MOE, num_hidden_layers=4, use_sliding_window=True, sliding_window=4, max_window_layers=4
    ),
    "qwen2_moe-layer-types-dense-middle": tiny_hf_config(
        Family.QWEN2_MOE,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
}
