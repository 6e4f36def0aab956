"""Chooses the backend of the expert feed-forward when a program is lowered for its platform.

On the CPU the C++ kernels where they could be loaded, else and elsewhere the XLA code of `reference.py`. The
environment variable FLASHMOE_KERNELS=xla leaves the kernels out.
"""

import functools

from jax import Array, lax

from flashmoe_jax import native
from flashmoe_jax.experts.ffn import native as kernels
from flashmoe_jax.experts.ffn import reference
from flashmoe_jax.experts.ffn.reference import FieldLike


def expert_ffn(
    out_TXD: Array, h_TD: Array, rows_RW: Array, row_TX: Array, active_TX: Array, fields: tuple[FieldLike, ...]
) -> Array:
    """As `reference.expert_ffn`."""
    arguments = (out_TXD, h_TD, rows_RW, row_TX, active_TX)
    plain = functools.partial(reference.expert_ffn, fields=fields)
    if not _are_kernels_usable(fields):
        return plain(*arguments)
    return lax.platform_dependent(*arguments, cpu=functools.partial(kernels.expert_ffn, fields=fields), default=plain)


def expert_ffn_group(
    y_TD: Array,
    h_TD: Array,
    rows_RW: Array,
    row: Array,
    token_G: Array,
    weight_G: Array,
    fields: tuple[FieldLike, ...],
) -> tuple[Array, Array]:
    """As `reference.expert_ffn_group`."""
    arguments = (y_TD, h_TD, rows_RW, row, token_G, weight_G)
    plain = functools.partial(reference.expert_ffn_group, fields=fields)
    if not _are_kernels_usable(fields):
        return plain(*arguments)
    fast = functools.partial(kernels.expert_ffn_group, fields=fields)
    return lax.platform_dependent(*arguments, cpu=fast, default=plain)


def _are_kernels_usable(fields: tuple[FieldLike, ...]) -> bool:
    return all(field.dtype in native.DTYPE_CODES for field in fields) and native.load().is_loaded
