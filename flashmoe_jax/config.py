"""What a model is: `ModelConfig`, read from a Hugging Face `config.json`.

Owns the fields that the decoder's maths depends on, and the refusal of every field that would change the maths and
that we do not handle. Does not know weight names (`models/families.py`) or memory (`engine/budget.py`). Invariant:
two configs that compare equal describe the same function of the weights.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from flashmoe_jax.errors import ConfigError


class Family(enum.StrEnum):
    """Supported model families, named after `model_type` in `config.json`."""

    OLMOE = "olmoe"
    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2_moe"


class ReaderName(enum.StrEnum):
    """How records are read from the drive; what `--reader` takes."""

    AUTO = "auto"
    ARRAY = "array"
    RANGE = "range"
    DIRECT = "direct"


class PrefetchMode(enum.StrEnum):
    """When experts are read ahead of their layer; what `--prefetch` takes."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class QKNorm(enum.StrEnum):
    """Where queries and keys are RMS-normalised before the rotary embedding."""

    NONE = "none"
    HEAD = "head"  # each head on its own, scale [H] (Qwen3)
    FULL = "full"  # the whole projection at once, scale [N*H] and [K*H] (OLMoE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and maths of one decoder; sizes are counts of elements.

    `moe_layers` lists the layer ids whose feed-forward is a mixture of experts; an index into it is a *MoE layer id*,
    the first axis of the expert store, of the slots and of a trace. `layer_windows[i]` is the sliding window of layer
    i in tokens, None for full attention.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_hidden: int
    dense_hidden: int
    shared_expert_hidden: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    qk_norm: QKNorm
    clip_qkv: float | None
    norm_topk_prob: bool
    qkv_bias: bool
    out_bias: bool
    tie_embeddings: bool
    layer_windows: tuple[int | None, ...]
    moe_layers: tuple[int, ...]
    weight_dtype: str

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            _require(_is_count(count), f"{name} is {count!r}; it must be an integer of at least 1")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd; the rotary embedding needs it even")
        _require(
            self.experts_per_token <= self.num_experts,
            f"num_experts_per_tok {self.experts_per_token} exceeds num_experts {self.num_experts}",
        )
        _require(
            len(self.layer_windows) == self.num_layers,
            f"{len(self.layer_windows)} layer types are given for {self.num_layers} layers",
        )
        _require(len(self.moe_layers) >= 1, "no layer is a mixture of experts; there is nothing to offload")
        _require(
            self.weight_dtype in WEIGHT_DTYPES,
            f"dtype {self.weight_dtype} is not supported; use one of {', '.join(WEIGHT_DTYPES)}",
        )

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def moe_layer_id(self) -> dict[int, int]:
        """Layer id to MoE layer id."""
        return {layer: i for i, layer in enumerate(self.moe_layers)}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form for the manifest; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        fields = {f.name for f in dataclasses.fields(cls)}
        if set(values) != fields:
            odd = sorted(set(values) ^ fields)
            raise ConfigError(f"the manifest's config has missing or unknown fields {odd}; convert the model again")
        return cls(
            **{
                **values,
                "family": Family(values["family"]),
                "qk_norm": QKNorm(values["qk_norm"]),
                "layer_windows": tuple(values["layer_windows"]),
                "moe_layers": tuple(values["moe_layers"]),
            }
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Reads a parsed `config.json`.

        Raises:
            ConfigError: an unsupported `model_type`, a field that changes the maths and is not handled, two
                spellings of a field that disagree, or sizes that do not fit together.
        """
        model_type = hf.get("model_type")
        if model_type not in set(Family):
            raise ConfigError(f"model_type {model_type!r} is not supported; supported families: {', '.join(Family)}")
        return _read_hf(Family(model_type), _Fields(hf))


WEIGHT_DTYPES = ("bfloat16", "float16", "float32")
_COUNTS = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position"),
    *("num_experts", "experts_per_token", "expert_hidden", "dense_hidden"),
)

# Fields that never change an inference result: training, bookkeeping, and generation defaults.
_IGNORED = frozenset(
    """
    _attn_implementation_autoset _name_or_path add_cross_attention architectures attention_dropout auto_map
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise router_z_loss_coef
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torchscript transformers_version typical_p use_bfloat16 use_cache
    """.split()
)
# Fields whose one harmless value is accepted and whose every other value changes the maths.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, 1.0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "logit_scale": (1, 1.0, None),
    "mlp_bias": (False, None),
    "is_causal": (True,),
}


class _Fields:
    """A config.json that remembers which of its fields were read, so that the rest can be refused."""

    def __init__(self, hf: Mapping[str, Any]):
        self._hf = hf
        self._read: set[str] = set()

    def get(self, *spellings: str, default: Any = None) -> Any:
        """The value under any of the spellings; they must agree where several are present and not null."""
        self._read.update(spellings)
        found = {s: self._hf[s] for s in spellings if self._hf.get(s) is not None}
        if len({repr(v) for v in found.values()}) > 1:
            raise ConfigError(f"config.json contradicts itself: {found}; keep one spelling")
        return next(iter(found.values()), default)

    def need(self, *spellings: str) -> Any:
        value = self.get(*spellings)
        if value is None:
            raise ConfigError(f"config.json lacks {' / '.join(spellings)}; it is needed to build the model")
        return value

    def need_count(self, name: str) -> int:
        count = self.need(name)
        _require(_is_count(count), f"{name} is {count!r}; it must be an integer of at least 1")
        return count

    def refuse_the_rest(self, family: Family) -> None:
        for name, allowed in _NEUTRAL.items():
            if name in self._hf and name not in self._read and self._hf[name] not in allowed:
                raise ConfigError(
                    f"config.json sets {name} to {self._hf[name]!r}, which changes the maths and is not handled; "
                    f"allowed: {', '.join(map(repr, allowed))}"
                )
        unknown = sorted(set(self._hf) - self._read - _IGNORED - set(_NEUTRAL))
        if unknown:
            raise ConfigError(
                f"config.json sets {', '.join(unknown)}, which model_type {family} is not known to have; "
                "remove what does not change the maths, else the model is not supported"
            )


def _read_hf(family: Family, fields: _Fields) -> ModelConfig:
    num_layers = fields.need_count("num_hidden_layers")
    num_heads = fields.need_count("num_attention_heads")
    hidden_size = fields.need_count("hidden_size")
    # transformers ignores head_dim for OLMoE and Qwen2-MoE unless it is present, so a present one is honoured.
    head_dim = fields.get("head_dim", default=None)
    if head_dim is None:
        _require(
            hidden_size % num_heads == 0,
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and head_dim is absent",
        )
        head_dim = hidden_size // num_heads
    intermediate = fields.need("intermediate_size")
    qwen = family in (Family.QWEN2_MOE, Family.QWEN3_MOE)
    attention_bias = bool(fields.get("attention_bias", default=False))
    if family is Family.QWEN2_MOE:
        qkv_bias, out_bias = bool(fields.get("qkv_bias", default=True)), False
        _require(not attention_bias, "attention_bias is set; model_type qwen2_moe has qkv_bias instead")
    elif family is Family.MIXTRAL:
        qkv_bias = out_bias = False
        _require(not attention_bias, "attention_bias is set; model_type mixtral has no attention bias")
    else:
        qkv_bias = out_bias = attention_bias
    qk_norm = {Family.OLMOE: QKNorm.FULL, Family.QWEN3_MOE: QKNorm.HEAD}.get(family, QKNorm.NONE)
    if qk_norm is QKNorm.FULL:
        _require(
            num_heads * head_dim == hidden_size,
            f"num_attention_heads x head_dim is {num_heads * head_dim}; OLMoE needs hidden_size {hidden_size}",
        )
    norm_topk_prob = True if family is Family.MIXTRAL else bool(fields.get("norm_topk_prob", default=False))
    config = ModelConfig(
        family=family,
        vocab_size=fields.need("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(family, fields, num_heads),
        head_dim=head_dim,
        num_experts=fields.need("num_local_experts", "num_experts"),
        experts_per_token=fields.need("num_experts_per_tok"),
        expert_hidden=fields.need("moe_intermediate_size") if qwen else intermediate,
        dense_hidden=intermediate,
        shared_expert_hidden=fields.need("shared_expert_intermediate_size") if family is Family.QWEN2_MOE else 0,
        rms_norm_eps=float(fields.need("rms_norm_eps")),
        rope_theta=_rope_theta(family, fields),
        max_position=fields.need("max_position_embeddings"),
        qk_norm=qk_norm,
        clip_qkv=_optional_float(fields.get("clip_qkv")) if family is Family.OLMOE else None,
        norm_topk_prob=norm_topk_prob,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        tie_embeddings=bool(fields.get("tie_word_embeddings", default=False)),
        layer_windows=_layer_windows(family, fields, num_layers),
        moe_layers=_moe_layers(fields, num_layers) if qwen else tuple(range(num_layers)),
        weight_dtype=_dtype(fields),
    )
    fields.refuse_the_rest(family)
    return config


def _num_kv_heads(family: Family, fields: _Fields, num_heads: int) -> int:
    # An absent count means one per query head in OLMoE. Elsewhere the classes of transformers put a number of their
    # own in its place, which no checkpoint can be meant to depend on.
    if family is Family.OLMOE:
        return fields.get("num_key_value_heads", default=num_heads)
    return fields.need("num_key_value_heads")


def _rope_theta(family: Family, fields: _Fields) -> float:
    """Base of the rotary embedding from the old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) spelling."""
    default = 1e6 if family is Family.MIXTRAL else 1e4
    old_theta = fields.get("rope_theta")
    parameters = dict(fields.get("rope_parameters") or {})
    scaling = dict(fields.get("rope_scaling") or {})
    for name, block in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = block.pop("rope_type", block.pop("type", "default"))
        block.pop("type", None)
        if kind != "default":
            raise ConfigError(f"config.json sets {name} to rope_type {kind!r}; only 'default' is handled")
        odd = sorted(
            k
            for k, v in block.items()
            if k != "rope_theta" and v is not None and (k, v) != ("partial_rotary_factor", 1.0)
        )
        if odd:
            raise ConfigError(f"config.json sets {name}.{odd[0]}, which changes the maths and is not handled")
    thetas = {float(t) for t in (old_theta, parameters.get("rope_theta"), scaling.get("rope_theta")) if t is not None}
    if len(thetas) > 1:
        raise ConfigError(
            f"config.json contradicts itself: rope_theta and rope_parameters give {sorted(thetas)}; keep one"
        )
    return thetas.pop() if thetas else default


def _layer_windows(family: Family, fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer, by the rule of each family's reference module in transformers."""
    window = fields.get("sliding_window")
    if family is Family.OLMOE:
        _require(window is None, "sliding_window is set; model_type olmoe has none")
        return (None,) * num_layers
    if family is Family.MIXTRAL:
        _require(window is None or window >= 1, f"sliding_window is {window}; it must be at least 1, or null")
        return (window,) * num_layers
    used = bool(fields.get("use_sliding_window", default=False))
    max_window_layers = fields.get("max_window_layers", default=28)
    layer_types = fields.get("layer_types")
    if not used:
        # transformers drops the window itself then, whatever layer_types says of the layers.
        if layer_types and "sliding_attention" in layer_types:
            raise ConfigError("config.json lists sliding_attention layers but use_sliding_window is false; keep one")
        return (None,) * num_layers
    _require(isinstance(window, int) and window >= 1, f"use_sliding_window is set and sliding_window is {window}")
    if family is Family.QWEN3_MOE:
        full = layer_types and set(layer_types) != {"sliding_attention"}
        _require(not full, "layer_types has layers without a window, but qwen3_moe applies its window to every layer")
        return (window,) * num_layers
    if layer_types is None:
        layer_types = [
            "sliding_attention" if i % 2 == 0 and i < max_window_layers else "full_attention" for i in range(num_layers)
        ]
    unknown = set(layer_types) - {"sliding_attention", "full_attention"}
    _require(not unknown, f"layer_types holds {sorted(unknown)}; known: sliding_attention, full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _moe_layers(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    """Layer ids with experts: every `decoder_sparse_step`-th, less `mlp_only_layers` (Qwen2/3MoeDecoderLayer)."""
    step = fields.get("decoder_sparse_step", default=1)
    _require(step >= 1, f"decoder_sparse_step is {step}; it must be at least 1")
    dense_only = set(fields.get("mlp_only_layers", default=()))
    return tuple(i for i in range(num_layers) if i not in dense_only and (i + 1) % step == 0)


def _dtype(fields: _Fields) -> str:
    dtype = fields.get("dtype", "torch_dtype", default="bfloat16")
    return str(dtype).removeprefix("torch.")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {message}")
