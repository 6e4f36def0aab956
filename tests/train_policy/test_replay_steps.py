"""Traces as steps: what one step is, what policies are shown, where everything starts anew."""

import numpy as np
import pytest
from traces import EXPERTS, trace_of

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.telemetry.trace import DECODE, PREFILL
from train_policy.replay_steps import Mode, Steps, by_sequence, joined, make_steps


def requested(steps: Steps, layer: int = 0) -> list[list[int]]:
    ids, start = steps.layers[layer][:2]
    return [ids[start[s] : start[s + 1]].tolist() for s in range(steps.num_steps)]


class TestToken:
    def test_a_row_is_a_step_of_distinct_ids_in_order(self):
        steps = make_steps(trace_of([[[3, 1, 3]], [[-1, 5, 0]], [[-1, -1, -1]]]))
        assert requested(steps) == [[1, 3], [0, 5], []]
        assert steps.layers[0].first_token.tolist() == steps.layers[0].last_token.tolist() == [0, 1, 2]
        assert not steps.is_prefill.any() and not steps.is_cold.any()
        assert steps.num_rows.tolist() == [3, 0]

    def test_the_phase_means_nothing(self):
        ids = [[[0, 1]], [[1, 2]]]
        one, other = make_steps(trace_of(ids)), make_steps(trace_of(ids, phase=[PREFILL, PREFILL], step=[0, 0]))
        assert requested(one) == requested(other)
        assert not other.is_prefill.any()

    def test_reset_replays_every_sequence_alone(self):
        trace = trace_of([[[e]] for e in (0, 1, 2, 3, 4)], seq_id=[7, 2, 7, 2, 7])
        steps = make_steps(trace, reset=True)
        assert requested(steps) == [[0], [2], [4], [1], [3]]
        assert steps.is_cold.tolist() == steps.is_fresh.tolist() == [True, False, False, True, False]


class TestAccess:
    def test_an_id_is_a_step(self):
        steps = make_steps(trace_of([[[3, 1], [0, -1]], [[2, 2], [4, 5]]]), Mode.ACCESS)
        assert requested(steps, 0) == [[3], [1], [2], [2]]
        assert requested(steps, 1) == [[0], [], [4], [5]]
        assert steps.layers[0].first_token.tolist() == steps.layers[0].last_token.tolist() == [0, 0, 1, 1]
        assert steps.updates[:, 0, 0].tolist() == [3, 1, 2, 2]

    def test_reset(self):
        steps = make_steps(trace_of([[[0, 1]], [[2, 3]]], seq_id=[0, 1]), Mode.ACCESS, reset=True)
        assert steps.is_cold.tolist() == steps.is_fresh.tolist() == [True, False, True, False]


class TestEngine:
    def batch(self, **changes):
        columns = {
            "seq_id": [0, 0, 1, 1, 1, 0, 1, 1],
            "phase": [PREFILL] * 5 + [DECODE] * 3,
            "step": [0, 0, 0, 0, 0, 1, 1, 2],
        }
        return trace_of([[[e, 5]] for e in (0, 1, 2, 3, 4, 0, 1, 2)], **{**columns, **changes})

    def test_prompts_and_batch_steps(self):
        steps = make_steps(self.batch(), Mode.ENGINE)
        assert requested(steps) == [[0, 1, 2, 3, 4, 5], [0, 1, 5], [2, 5]]
        assert steps.is_prefill.tolist() == [True, False, False]
        # The longer prompt has three tokens.
        assert steps.layers[0].first_token.tolist() == [0, 3, 4]
        assert steps.layers[0].last_token.tolist() == [2, 3, 4]
        # 5 is asked for by the first tokens, 4 by the third of the second prompt.
        assert steps.layers[0].position.tolist() == [0, 1, 0, 1, 2, 0, *[0] * 5]
        assert steps.num_rows.tolist() == [3, 5]

    def test_policies_see_a_prompt_token_by_token_and_a_batch_side_by_side(self):
        steps = make_steps(self.batch(), Mode.ENGINE)
        assert steps.updates[:, 0].tolist() == [
            [0, 5, 2, 5],
            [1, 5, 3, 5],
            [-1, -1, 4, 5],
            [0, 5, 1, 5],
            [2, 5, -1, -1],
        ]
        assert steps.last_update.tolist() == [2, 3, 4]

    def test_reset_is_where_a_new_sequence_comes(self):
        trace = self.batch(seq_id=[0, 0, 1, 1, 1, 0, 2, 2])
        steps = make_steps(trace, Mode.ENGINE, reset=True)
        assert steps.is_cold.tolist() == [True, True, False]
        assert np.flatnonzero(steps.is_fresh).tolist() == [0, 3]

    def test_prompt_tokens_numbered_one_by_one_are_one_step(self):
        trace = self.batch(step=np.arange(8), seq_id=[0, 0, 1, 1, 1, 1, 1, 1])
        steps = make_steps(trace, Mode.ENGINE)
        assert requested(steps)[:3] == [[0, 1, 5], [2, 3, 4, 5], [0, 5]]
        assert steps.is_prefill.tolist() == [True, True, False, False, False]

    def test_turns_of_one_sequence_stay_apart(self):
        trace = self.batch(step=[0, 0, 1, 1, 1, 2, 3, 4], seq_id=[0] * 8)
        assert requested(make_steps(trace, Mode.ENGINE))[:2] == [[0, 1, 5], [2, 3, 4, 5]]


class TestJoined:
    def test_sequences_and_steps_of_several_traces_stay_apart(self):
        trace = trace_of([[[0]], [[1]]], seq_id=[0, 0], step=[0, 0], phase=[PREFILL, PREFILL])
        both = joined([trace, trace])
        assert both.seq_id.tolist() == [0, 0, 1, 1]
        assert requested(make_steps(both, Mode.ENGINE)) == [[0, 1], [0, 1]]

    def test_experts_come_from_meta_then_from_the_option_then_from_the_ids(self):
        trace = trace_of([[[0, 3]]])
        assert joined([trace]).meta["experts"] == EXPERTS
        bare = trace._replace(meta={})
        assert joined([bare], 9).meta["experts"] == 9
        assert joined([bare]).meta["experts"] == 4

    @pytest.mark.parametrize(
        ("change", "experts", "message"),
        [
            ({"meta": {"experts": 3}}, None, "expert ids up to 3 and a layer has 3 experts"),
            ({"meta": {}}, 3, "expert ids up to 3"),
            ({}, 9, "6 experts per layer and --experts is 9"),
            ({"ids": np.full((1, 1, 2), -1)}, None, "names no expert"),
            ({"meta": {"experts": "many"}}, None, "meta gives many experts"),
            ({"meta": {"experts": 0}}, None, "meta gives 0 experts"),
        ],
    )
    def test_refuses(self, change: dict, experts: int | None, message: str):
        with pytest.raises(ConfigError, match=message):
            joined([trace_of([[[0, 3]]])._replace(**change)], experts)

    def test_refuses_traces_of_different_models(self):
        with pytest.raises(ConfigError, match="different models"):
            joined([trace_of([[[0, 3]]]), trace_of([[[0, 3]]], 9)])
        with pytest.raises(ConfigError, match="different models"):
            joined([trace_of([[[0, 3]]]), trace_of([[[0, 3], [0, 1]]])])


class TestWideColumns:
    def traces(self, width: int = 4):
        one = trace_of([[[0, 1]], [[1, 2]], [[2, 3]]], seq_id=[0, 1, 0])
        hidden = np.arange(3 * width, dtype=np.float16).reshape(3, 1, width)
        return one._replace(hidden=hidden), one._replace(hidden=hidden + 100)

    def test_are_kept_where_all_traces_have_them(self):
        one, other = self.traces()
        hidden = joined([one, other]).hidden
        assert hidden is not None and hidden[:, 0, 0].tolist() == [0, 4, 8, 100, 104, 108]
        assert joined([one, other._replace(hidden=None)]).hidden is None
        assert joined([one, self.traces(width=5)[1]]).hidden is None

    def test_are_sorted_with_their_rows(self):
        trace = joined([self.traces()[0]])
        ordered = by_sequence(trace)
        assert ordered.ids[:, 0, 0].tolist() == [0, 2, 1]
        assert ordered.hidden[:, 0, 0].tolist() == [0, 8, 4]
