"""Names of the weights in Hugging Face checkpoints, one table per family.

Maps a checkpoint key to a dense weight's path (`weights.py`) or to one field of one expert, and back. A key matches
exactly one row; a key that matches none is an error that names it.
"""

import re
from typing import NamedTuple

from flashmoe_jax.config import Family, ModelConfig
from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.models.weights import dense_weight_specs, expert_field_specs


class DenseTarget(NamedTuple):
    """A weight that stays on the device."""

    path: str


class ExpertTarget(NamedTuple):
    """One field of one expert's record; `moe_layer` counts MoE layers only."""

    moe_layer: int
    expert: int
    field: str


class FusedExpertsTarget(NamedTuple):
    """All experts of a layer in one tensor `[E, ...]`, its second axis holding `fields` one after the other."""

    moe_layer: int
    fields: tuple[str, ...]


Target = DenseTarget | ExpertTarget | FusedExpertsTarget

# Our path within a layer to the checkpoint's, without the `model.layers.N.` prefix and the `.weight` suffix.
_LAYER_NAMES = {
    "input_norm.scale": "input_layernorm.weight",
    "post_norm.scale": "post_attention_layernorm.weight",
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
    **{
        f"attention.{proj}.{ours}": f"self_attn.{proj}.{theirs}"
        for proj in ("q_proj", "k_proj", "v_proj", "o_proj")
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    **{
        f"{block}.{proj}.kernel": f"{prefix}.{proj}.weight"
        for block, prefix in (("mlp", "mlp"), ("shared_expert", "mlp.shared_expert"))
        for proj in ("gate_proj", "up_proj", "down_proj")
    },
    "shared_expert_gate.kernel": "mlp.shared_expert_gate.weight",
    "router.kernel": "mlp.gate.weight",
}
_TOP_NAMES = {
    "embedder.embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
# Mixtral keeps the names of its first release: w1 is the gate, w3 the up and w2 the down projection.
_MIXTRAL_FIELDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class NameMap:
    """Checkpoint key to target and back, for one config."""

    def __init__(self, config: ModelConfig):
        self._config = config
        mixtral = config.family is Family.MIXTRAL
        self._moe_block = "block_sparse_moe" if mixtral else "mlp"
        self._field_names = {f: _MIXTRAL_FIELDS[f] if mixtral else f for f, _ in expert_field_specs(config)}
        self._path_of_key = {self.hf_key(DenseTarget(path)): path for path in dense_weight_specs(config)}
        # transformers 5 holds Mixtral's routers under the name of the other families, and can save them so.
        self._aliases = {
            key.replace(".block_sparse_moe.", ".mlp."): path
            for key, path in self._path_of_key.items()
            if ".block_sparse_moe." in key
        }
        layer_id = r"model\.layers\.(?P<layer>\d+)"
        names = "|".join(self._field_names.values())
        self._expert_key = re.compile(
            rf"{layer_id}\.{self._moe_block}\.experts\.(?P<expert>\d+)\.(?P<field>{names})\.weight"
        )
        self._fused_key = re.compile(rf"{layer_id}\.mlp\.experts\.(?P<field>{'|'.join(_FUSED)})")

    def locate(self, key: str) -> Target:
        """Where the tensor of a checkpoint key belongs.

        Raises:
            CheckpointError: the key is not a weight of this model.
        """
        if key in self._path_of_key:
            return DenseTarget(self._path_of_key[key])
        if key in self._aliases:
            return DenseTarget(self._aliases[key])
        if self._config.tie_embeddings and key == "lm_head.weight":
            return DenseTarget("embedder.embedding")
        if match := self._expert_key.fullmatch(key):
            moe_layer, expert = self._moe_layer(key, match["layer"]), int(match["expert"])
            if expert >= self._config.num_experts:
                raise CheckpointError(
                    f"{key} names expert {expert}, but config.json has num_experts {self._config.num_experts}"
                )
            field = next(ours for ours, theirs in self._field_names.items() if theirs == match["field"])
            return ExpertTarget(moe_layer, expert, field)
        if match := self._fused_key.fullmatch(key):
            return FusedExpertsTarget(self._moe_layer(key, match["layer"]), _FUSED[match["field"]])
        raise CheckpointError(
            f"{key} is not a weight of a {self._config.family} model of this shape; "
            "check that config.json belongs to this checkpoint"
        )

    def hf_key(self, target: DenseTarget | ExpertTarget) -> str:
        """The checkpoint key of a target, as the family's published checkpoints spell it."""
        if isinstance(target, ExpertTarget):
            layer = self._config.moe_layers[target.moe_layer]
            return (
                f"model.layers.{layer}.{self._moe_block}.experts.{target.expert}."
                f"{self._field_names[target.field]}.weight"
            )
        if target.path in _TOP_NAMES:
            return _TOP_NAMES[target.path]
        _, layer_id, path = target.path.split(".", 2)
        name = f"{self._moe_block}.gate.weight" if path == "router.kernel" else _LAYER_NAMES[path]
        return f"model.layers.{layer_id}.{name}"

    def expected_keys(self) -> list[str]:
        """Every key of a complete checkpoint, dense weights first, then experts in store order."""
        experts = [
            self.hf_key(ExpertTarget(layer, expert, field))
            for layer in range(self._config.num_moe_layers)
            for expert in range(self._config.num_experts)
            for field in self._field_names
        ]
        return [*self._path_of_key, *experts]

    def _moe_layer(self, key: str, layer: str) -> int:
        moe_layer = self._config.moe_layer_id.get(int(layer))
        if moe_layer is None:
            raise CheckpointError(f"{key} holds experts, but by config.json layer {layer} has none")
        return moe_layer


def hf_name_map(config: ModelConfig) -> NameMap:
    """The name map of a config's family."""
    return NameMap(config)
