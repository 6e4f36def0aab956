"""Expert feed-forward over slots; every backend has the signature of `reference.py`."""

from flashmoe_jax.experts.ffn.dispatch import expert_ffn, expert_ffn_group
from flashmoe_jax.experts.ffn.reference import add_expert_outputs, expert_matrices

__all__ = ["add_expert_outputs", "expert_ffn", "expert_ffn_group", "expert_matrices"]
