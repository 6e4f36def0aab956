"""A session: the KV cache of one conversation, or of one batch of prompts, and the two ways to go on with it.

Owns caches and lengths; shares the expert memory of its engine. A sequence's tokens stand at positions 0, 1, 2, ...,
whatever the other sequences of the batch do. Invariant: before every step the keys and values of `tokens[b]` are in
every cache, at its first positions.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashmoe_jax.engine.budget import cache_capacity, prompt_bucket
from flashmoe_jax.engine.capture import RouterCapture
from flashmoe_jax.engine.decode import decode_token
from flashmoe_jax.engine.dense import DenseWeights
from flashmoe_jax.engine.expert_memory import ExpertMemory
from flashmoe_jax.engine.prefill import prefill_prompt
from flashmoe_jax.errors import PromptError
from flashmoe_jax.models.attention import KVCache, init_cache
from flashmoe_jax.telemetry.trace import DECODE, PREFILL, TraceRecorder


class Session:
    """Sequences that share a batch; use `Engine.session`.

    Args:
        context: cache tokens per sequence, prompts and outputs of all turns together.
        recorder: gets every step's routing, or None.
    """

    def __init__(
        self,
        dense: DenseWeights,
        memory: ExpertMemory,
        *,
        batch_size: int,
        context: int,
        first_seq_id: int = 0,
        recorder: TraceRecorder | None = None,
    ):
        self._dense, self._memory, self._recorder = dense, memory, recorder
        self.context = context
        self._capacity = cache_capacity(context)
        self._seq_id = np.arange(first_seq_id, first_seq_id + batch_size)
        self.tokens: list[list[int]] = [[] for _ in range(batch_size)]  # ids at the cached positions
        self._caches: list[KVCache] = []
        self._make_caches()
        self._are_caches_whole = True

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int32 `[B]`."""
        return np.array([len(tokens) for tokens in self.tokens], np.int32)

    @property
    def vocab_size(self) -> int:
        return self._dense.config.vocab_size

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Array:
        """Appends tokens to every sequence.

        Args:
            prompts: ids per sequence, at least one each.

        Returns:
            Logits `[B, V]` float32 after the last token of each.

        Raises:
            PromptError: an empty prompt, an id outside the vocabulary, or more tokens than the cache has room for.
            CheckpointError: a record is damaged; the expert memory is empty then, the session is unchanged.
        """
        if len(prompts) != self.batch_size:
            raise PromptError(f"{len(prompts)} prompts are given for a session of {self.batch_size} sequences")
        if not all(len(prompt) for prompt in prompts):
            raise PromptError("a prompt is empty; give at least one token")
        self._check_room(max(len(t) + len(p) for t, p in zip(self.tokens, prompts, strict=True)))
        vocab_size = self.vocab_size
        if any(min(prompt) < 0 or max(prompt) >= vocab_size for prompt in prompts):
            raise PromptError(f"a token id is outside 0 to {vocab_size - 1}; is the tokenizer of this model?")
        self._restore_caches()
        logits = self._run_prompts(prompts, self.lengths, self._recorder)
        for cached, prompt in zip(self.tokens, prompts, strict=True):
            cached.extend(int(t) for t in prompt)
        return logits

    def decode(self, tokens: np.ndarray, active: np.ndarray | None = None) -> Array:
        """Appends one token to every active sequence.

        Args:
            tokens: int32 `[B]` ids.
            active: bool `[B]`; the others keep their state and ask for no expert. None for all.

        Returns:
            Logits `[B, V]` float32; rows of sequences that are not active mean nothing.

        Raises:
            PromptError, CheckpointError: as for `prefill`.
        """
        active_B = np.ones(self.batch_size, bool) if active is None else np.asarray(active, bool)
        lengths = self.lengths
        self._check_room(int((lengths + active_B).max()))
        self._restore_caches()
        token_B = np.asarray(tokens, np.int32)
        position_B = np.where(active_B, lengths, self._capacity).astype(np.int32)
        capture = _capture(self._recorder)
        with self._memory.whole_step():
            logits, chosen_BLX = decode_token(
                self._dense, self._memory, self._caches, token_B, position_B, active_B, capture
            )
        if self._recorder is not None:
            wide = {} if capture is None else capture.rows(active_B)
            self._recorder.add_step(chosen_BLX[active_B], self._seq_id[active_B], token_B[active_B], DECODE, **wide)
        for b in np.flatnonzero(active_B):
            self.tokens[b].append(int(token_B[b]))
        return logits

    def rewind(self, sequence: int, length: int) -> None:
        """Forgets the tokens of a sequence from position `length` on; what stays need not be computed again.

        Raises:
            PromptError: the sequence has fewer tokens.
        """
        held = len(self.tokens[sequence])
        if not 0 <= length <= held:
            raise PromptError(f"sequence {sequence} has {held} tokens and cannot go back to {length} of them")
        del self.tokens[sequence][length:]

    def _run_prompts(
        self, prompts: Sequence[Sequence[int]], lengths: np.ndarray, recorder: TraceRecorder | None
    ) -> Array:
        """Computes prompts behind the first `lengths` positions; one may be empty, its logits mean nothing then."""
        added = np.array([len(p) for p in prompts], np.int32)
        tokens = prompt_bucket(int(added.max()))
        token_BT = np.zeros((self.batch_size, tokens), np.int32)
        for b, prompt in enumerate(prompts):
            token_BT[b, : added[b]] = prompt
        column_T = np.arange(tokens, dtype=np.int32)
        valid_BT = column_T < added[:, None]
        position_BT = np.where(valid_BT, lengths[:, None] + column_T, self._capacity).astype(np.int32)
        attend_length = min(self._capacity, prompt_bucket(int((lengths + added).max())))
        capture = _capture(recorder)
        with self._memory.whole_step():
            logits, chosen_BTLX = prefill_prompt(
                self._dense, self._memory, self._caches, token_BT, position_BT, valid_BT, attend_length, capture
            )
        if recorder is not None:
            seq_BT = np.broadcast_to(self._seq_id[:, None], valid_BT.shape)
            wide = {} if capture is None else capture.rows(valid_BT)
            recorder.add_step(chosen_BTLX[valid_BT], seq_BT[valid_BT], token_BT[valid_BT], PREFILL, **wide)
        return logits

    def _make_caches(self) -> None:
        config, device = self._dense.config, self._memory.device
        dtype = jnp.dtype(config.weight_dtype)
        self._caches = []  # the old ones go first
        for _ in range(config.num_layers):
            cache = init_cache(self.batch_size, self._capacity, config.num_kv_heads, config.head_dim, dtype)
            self._caches.append(jax.device_put(cache, device))

    def _restore_caches(self) -> None:
        """Ctrl-C between a step's donation of a cache and its return loses the cache: it is computed again here."""
        if self._are_caches_whole and not any(cache.k.is_deleted() for cache in self._caches):
            return
        self._are_caches_whole = False
        self._make_caches()
        if any(self.tokens):
            self._run_prompts(self.tokens, np.zeros(self.batch_size, np.int32), None)
        self._are_caches_whole = True

    def _check_room(self, length: int) -> None:
        if length > self.context:
            raise PromptError(
                f"{length} tokens are needed and the context has room for {self.context}; shorten the prompt, ask for "
                "fewer new tokens, or give a larger --max-context"
            )


def _capture(recorder: TraceRecorder | None) -> RouterCapture | None:
    """For one step, where the recorder wants more than ids."""
    return RouterCapture(recorder.wide_columns) if recorder is not None and recorder.wide_columns else None
