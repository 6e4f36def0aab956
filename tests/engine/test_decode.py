"""Decode: what is read when, the surplus of a batch, and that no row changes while a computation reads it."""

import numpy as np
import pytest
from resident_reference import ResidentSession, greedy_tokens
from tiny_engines import ALL, BATCH, CONTEXT, HALF, TOP_K, TinyModel, make_engine, random_prompts, same_bits
from watched_store import RecordingStore, RowWatch, assert_slots_hold_their_experts

from flashmoe_jax.engine import decode

LENGTHS = [5, 16, 1, 9]


def test_a_step_reads_what_it_misses_and_nothing_else(mixed: TinyModel):
    store = RecordingStore(mixed)
    with make_engine(mixed, slots=HALF, store=store) as engine:
        session, plain = engine.session(BATCH), ResidentSession(mixed.reference, BATCH, CONTEXT)
        prompts = random_prompts(mixed.config, 0, LENGTHS)
        logits, _ = session.prefill(prompts), plain.prefill(prompts)
        for step in range(8):
            store.take_reads()
            before = engine.memory.resident_experts()
            token_B, active_B = np.asarray(logits).argmax(-1), np.arange(BATCH) != step % 5
            logits, expected = session.decode(token_B, active_B), plain.decode(token_B, active_B)
            same_bits(np.asarray(logits)[active_B], expected[active_B])
            reads, after = store.take_reads(), engine.memory.resident_experts()
            for layer in range(mixed.config.num_moe_layers):
                needed = {int(e) for e in plain.expert_ids[-1][active_B, layer].ravel()}
                missing = needed - before[layer]
                assert sorted(e for moe_layer, e in reads if moe_layer == layer) == sorted(missing)
                # Nobody who is needed leaves, and nobody leaves while a slot is free.
                assert before[layer] & needed <= after[layer]
                assert len(after[layer]) == min(HALF, len(before[layer] | missing))
                assert after[layer] <= before[layer] | missing
            assert_slots_hold_their_experts(engine, mixed)


def test_a_layer_that_holds_all_is_not_waited_for(mixed: TinyModel, monkeypatch: pytest.MonkeyPatch):
    looked_at: list[bool] = []

    def recorded(memory, layer, *rest):
        looked_at.append(memory.holds_all(layer))
        return compute_missing(memory, layer, *rest)

    compute_missing = decode._compute_missing
    monkeypatch.setattr(decode, "_compute_missing", recorded)
    with make_engine(mixed, slots=ALL) as engine:
        num_layers = mixed.config.num_moe_layers
        random, plain = np.random.RandomState(0), ResidentSession(mixed.reference, BATCH, CONTEXT)
        session, prompts = engine.session(BATCH), random_prompts(mixed.config, 0, LENGTHS)
        session.prefill(prompts), plain.prefill(prompts)
        num_unseen = accesses = 0
        for _ in range(40):
            held = [len(residents) == ALL for residents in engine.memory.resident_experts()]
            assert held == [engine.memory.holds_all(layer) for layer in range(num_layers)]
            looked_at.clear()
            token_B = random.randint(3, mixed.config.vocab_size, BATCH)
            same_bits(np.asarray(session.decode(token_B)), plain.decode(token_B))
            assert len(looked_at) == num_layers - sum(held)
            assert not any(looked_at)
            num_unseen += sum(held)
            accesses += sum(len(np.unique(plain.expert_ids[-1][:, layer])) for layer in range(num_layers))
        assert num_unseen > 20
        assert engine.stats()["accesses"] == accesses
        engine.memory.reset()
        assert not engine.memory.holds_all(0)


@pytest.mark.parametrize("inserted", [False, True], ids=["aliased", "inserted"])
def test_a_surplus_larger_than_the_ring_goes_in_rounds(inserted: bool, mixed: TinyModel):
    with make_engine(mixed, slots=TOP_K, num_staging=2, inserted=inserted) as engine:
        fetcher, reads_per_call = engine.memory.fetcher, []
        start = fetcher.start

        def counted_start(layer, placements):
            placements = list(placements)
            reads_per_call.append(len(placements))
            return start(layer, placements)

        fetcher.start = counted_start  # type: ignore[method-assign]
        for seed in range(2):
            prompts = random_prompts(mixed.config, seed, LENGTHS)
            expected_tokens, expected = greedy_tokens(ResidentSession(mixed.reference, BATCH, CONTEXT), prompts, 6)
            session = engine.session(BATCH)
            logits = [np.asarray(session.prefill(prompts))]
            reads_per_call.clear()
            for step in range(5):
                token_B = np.array([tokens[step] for tokens in expected_tokens])
                logits.append(np.asarray(session.decode(token_B)))
            same_bits(np.stack(logits), np.stack(expected))
            assert_slots_hold_their_experts(engine, mixed)
            # Three admitted and two staged at the most; 10 pairs of step and layer, so more calls are more rounds.
            assert max(reads_per_call) <= TOP_K + 2
            assert len(reads_per_call) > 20


def test_no_row_is_written_while_a_computation_reads_it(mixed: TinyModel):
    """Steps follow each other, and sessions too, without a look at the logits in between."""
    store = RecordingStore(mixed)
    with make_engine(mixed, slots=TOP_K, num_staging=2, store=store) as engine:
        watch = RowWatch(engine, store)
        random = np.random.RandomState(0)
        prompts = [random_prompts(mixed.config, seed, LENGTHS) for seed in range(3)]
        tokens = random.randint(3, 60, size=(4, 2, BATCH))
        sessions = [engine.session(BATCH) for _ in range(2)]
        logits = [[session.prefill(prompts[side])] for side, session in enumerate(sessions)]
        for step_tokens in tokens:
            for side, session in enumerate(sessions):
                logits[side].append(session.decode(step_tokens[side]))
        logits.append([engine.session(BATCH).prefill(prompts[2])])
        assert watch.num_rewritten > 50
        for side in range(2):
            plain = ResidentSession(mixed.reference, BATCH, CONTEXT)
            expected = [plain.prefill(prompts[side]), *(plain.decode(step_tokens[side]) for step_tokens in tokens)]
            same_bits(np.stack(logits[side]), np.stack(expected))
        same_bits(np.asarray(logits[2][0]), ResidentSession(mixed.reference, BATCH, CONTEXT).prefill(prompts[2]))
