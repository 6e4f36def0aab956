"""`python -m train_policy evaluate`: figures against cases counted by hand, intervals, files, and mistakes."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_policies import random_policy
from traces import EXPERTS, TOP_K, random_ids, trace_of

from flashmoe_jax.errors import ConfigError
from flashmoe_jax.policy import STATIC_NAME, PolicyShape, save_popularity
from flashmoe_jax.policy.base import ROUTER_LOGITS
from flashmoe_jax.policy.saved import save_policy
from flashmoe_jax.telemetry.trace import Trace, load_trace, popularity, save_trace
from train_policy.__main__ import main
from train_policy.audit import ACCESSES, EVICTIONS, GOOD, LRU_GOOD, MISSES, REFETCHES, Auditor
from train_policy.evaluate import Candidate, Trial, choose_prompts, read_candidates
from train_policy.figures import METRICS, evaluated, layer_gaps, rows
from train_policy.provenance import fingerprint, read_trained_on, trained_on
from train_policy.replay import Replayer
from train_policy.replay_steps import joined

LOGGED = ("lru", "lfu", "decayed", "random", "fifo", "lfu-resident", "arc", "lecar", "s3fifo", "min")


def audited(trace: Trace, policy: str, slots: int) -> np.ndarray:
    replayer = Replayer(joined([trace]))
    _, prompt = np.unique(trace.seq_id, return_inverse=True)
    run = replayer.replay(policy, [slots], log_victims=True)[0].run
    return Auditor.of(replayer.steps, prompt).counts(run)


class TestAudit:
    def test_counts_by_hand(self):
        # One layer, one expert a token, two slots. LRU: 0, 1 come in; 2 makes 0 leave, which is used at once (bad:
        # 1 is never used again); 0 makes 1 leave (good); 3 makes 2 leave, where 2 and 0 are never used again (good).
        trace = trace_of([[[0]], [[1]], [[2]], [[0]], [[3]]], 4, seq_id=[5, 5, 5, 9, 9])
        counts = audited(trace, "lru", 2)[0]
        assert counts[:, ACCESSES].tolist() == [3, 2]
        assert counts[:, MISSES].tolist() == [3, 2]
        assert counts[:, EVICTIONS].tolist() == [1, 2]
        assert counts[:, REFETCHES].tolist() == [1, 0]
        assert counts[:, GOOD].tolist() == counts[:, LRU_GOOD].tolist() == [0, 2]
        # MIN lets 1 leave instead.
        counts = audited(trace, "min", 2)[0]
        assert counts[:, MISSES].tolist() == [3, 1]
        assert counts[:, EVICTIONS].tolist() == counts[:, GOOD].tolist() == [1, 1]
        assert counts[:, LRU_GOOD].tolist() == [0, 1]

    def test_of_two_that_leave_both_are_judged(self):
        # Four slots hold 0 1 2 3; 4 and 5 arrive together. Used again: 0 next, 1 then, 2 and 3 never.
        ids = [[[0, 1]], [[2, 3]], [[4, 5]], [[0, 4]], [[1, 4]]]
        counts = audited(trace_of(ids, 6), "lru", 4)[0, 0]
        assert counts[[EVICTIONS, GOOD, LRU_GOOD]].tolist() == [4, 2, 2]
        counts = audited(trace_of(ids, 6), "min", 4)[0, 0]
        assert counts[[EVICTIONS, GOOD, LRU_GOOD]].tolist() == [2, 2, 0]

    @settings(max_examples=15, deadline=None)
    @given(ids=random_ids(), slots=st.integers(TOP_K, EXPERTS), prompts=st.integers(1, 4))
    def test_sums_are_the_replays_own_and_min_is_always_right(self, ids: np.ndarray, slots: int, prompts: int):
        trace = trace_of(ids, seq_id=np.arange(len(ids)) * prompts // len(ids))
        for policy in LOGGED:
            run = Replayer(joined([trace])).replay(policy, [slots])[0].run
            counts = audited(trace, policy, slots)
            totals = counts.sum(axis=1)
            assert totals[:, ACCESSES].tolist() == run.decode.accesses.tolist()
            assert totals[:, MISSES].tolist() == run.decode.misses.tolist()
            assert totals[:, EVICTIONS].tolist() == run.decode.evictions.tolist()
            assert totals[:, REFETCHES].tolist() == run.decode.refetches.tolist()
            assert (counts[..., GOOD] <= counts[..., EVICTIONS]).all()
            if policy == "min":
                assert np.array_equal(counts[..., GOOD], counts[..., EVICTIONS])


def made_test(misses: dict[str, list[list[int]]], accesses: int = 100, tokens: int = 10, **changes) -> Trial:
    """A test of one layer whose policies miss so often, by slots and prompt."""
    counts = {}
    for policy, of_slots in misses.items():
        array = np.zeros((len(of_slots), 1, len(of_slots[0]), 6), np.int64)
        array[..., ACCESSES] = accesses
        array[..., MISSES] = np.array(of_slots)[:, None]
        array[..., EVICTIONS] = array[..., MISSES] // 2
        array[..., GOOD] = array[..., EVICTIONS] // 2
        counts[policy] = array
    num_prompts = array.shape[2]
    fields = {
        "name": "one",
        "file": "one.npz",
        "note": "all",
        "num_prompts": num_prompts,
        "tokens": np.full(num_prompts, tokens),
        "num_experts": 8,
        "slots": {f"{2 * i + 2}": 2 * i + 2 for i in range(len(of_slots))},
        "counts": counts,
    }
    return Trial(**{**fields, **changes})


MISSED = {
    "lru": [[60, 80, 70], [40, 50, 60]],
    "decayed": [[50, 70, 60], [38, 40, 48]],
    "min": [[30, 40, 50], [20, 25, 30]],
    "ours": [[45, 60, 55], [30, 35, 45]],
}
OURS = (Candidate(name="ours", folder=Path("ours")),)


class TestFigures:
    def value(self, metric: str, policy: str, place: int, *tests: Trial) -> float:
        evaluation = evaluated(OURS, tests or (made_test(MISSED),), num_draws=0, seed=0)
        return float(evaluation.figures[0].value[metric][place, evaluation.policies.index(policy)])

    def test_by_hand(self):
        assert self.value("hit_rate", "ours", 0) == pytest.approx(1 - 160 / 300)
        assert self.value("reads_per_token", "ours", 0) == pytest.approx(160 / 30)
        assert self.value("gap_lru", "ours", 0) == pytest.approx((210 - 160) / (210 - 120))
        assert self.value("gap_decayed", "ours", 1) == pytest.approx((126 - 110) / (126 - 75))
        assert self.value("reads_saved", "ours", 1) == pytest.approx(1 - 110 / 126)
        assert self.value("regret", "ours", 0) == pytest.approx(160 / 120)
        assert self.value("good_decisions", "ours", 0) == pytest.approx((11 + 15 + 13) / (22 + 30 + 27))
        mean = (50 / 90 + 40 / 75) / 2
        assert self.value("gap_lru", "ours", 2) == pytest.approx(mean)

    def test_the_ends_of_the_scales(self):
        for place in range(3):
            assert self.value("gap_lru", "lru", place) == self.value("gap_decayed", "decayed", place) == 0
            assert self.value("reads_saved", "decayed", place) == 0
            for metric in ("gap_lru", "gap_decayed", "regret"):
                assert self.value(metric, "min", place) == 1

    def test_tests_together_are_ratios_of_sums(self):
        other = made_test({p: [[2 * m for m in row] for row in rows] for p, rows in MISSED.items()}, 200, name="two")
        together = self.value("gap_lru", "ours", 0, made_test(MISSED), other)
        assert together == pytest.approx(self.value("gap_lru", "ours", 0))
        shifted = made_test({p: [[m + 5 * (p == "ours") for m in row] for row in rows] for p, rows in MISSED.items()})
        together = self.value("gap_lru", "ours", 0, made_test(MISSED), shifted._replace(name="two"))
        assert together == pytest.approx((420 - 335) / 180)

    def test_a_gap_that_is_none_has_no_share(self):
        flat = {policy: [[10, 10, 10]] for policy in MISSED}
        evaluation = evaluated(OURS, [made_test(flat)], num_draws=20, seed=0)
        assert np.isnan(evaluation.figures[0].value["gap_lru"]).all()
        assert rows(evaluation)[0]["gap_lru"] is None
        assert rows(evaluation)[0]["gap_lru_low"] is None

    def test_layers(self):
        test = made_test(MISSED)
        both = {p: np.concatenate([c, 2 * c], axis=1) for p, c in test.counts.items()}
        both["ours"][:, 1] = both["lru"][:, 1]
        evaluation = evaluated(OURS, [test._replace(counts=both)], num_draws=0, seed=0)
        ((name, slots, gap),) = layer_gaps(evaluation, "ours")
        assert name == "one" and slots == ["2", "4"] and gap.shape == (2, 2)
        assert gap[0].tolist() == pytest.approx([50 / 90, 0])


class TestIntervals:
    def test_are_paired(self):
        """Prompts differ much, policies by the same share everywhere: the share is certain, the hit rate is not."""
        random = np.random.default_rng(0)
        lru = random.integers(20, 80, 40) * 4
        misses = {"lru": [lru], "decayed": [lru * 3 // 4], "min": [lru // 2], "ours": [lru * 3 // 4]}
        evaluation = evaluated(OURS, [made_test(misses, 400)], num_draws=300, seed=1)
        figures, column = evaluation.figures[0], evaluation.policies.index("ours")
        assert figures.low["gap_lru"][0, column] == pytest.approx(0.5)
        assert figures.high["gap_lru"][0, column] == pytest.approx(0.5)
        assert figures.low["hit_rate"][0, column] < figures.value["hit_rate"][0, column] - 0.01
        for metric in METRICS:
            known = ~np.isnan(figures.value[metric])
            slack = 1e-9
            assert (figures.low[metric][known] <= figures.value[metric][known] + slack).all()
            assert (figures.high[metric][known] >= figures.value[metric][known] - slack).all()

    def test_cover_the_truth_about_as_often_as_they_say(self):
        """Prompts drawn from a world in which `ours` closes 0.4: nine of ten intervals and more contain it."""
        random = np.random.default_rng(2)
        covered = 0
        for draw in range(60):
            extra = random.poisson(random.gamma(4, 25, 50))  # what LRU misses more than MIN
            ours = random.binomial(extra, 0.6)
            misses = {"lru": [extra + 50], "decayed": [extra + 50], "min": [np.full(50, 50)], "ours": [ours + 50]}
            evaluation = evaluated(OURS, [made_test(misses, 1000)], num_draws=200, seed=draw)
            figures, column = evaluation.figures[0], evaluation.policies.index("ours")
            covered += figures.low["gap_lru"][0, column] <= 0.4 <= figures.high["gap_lru"][0, column]
        assert covered >= 51

    def test_the_same_seed_gives_the_same(self):
        first, again, other = (
            rows(evaluated(OURS, [made_test(MISSED)], num_draws=100, seed=seed)) for seed in (3, 3, 4)
        )
        assert first == again != other

    def test_one_prompt_has_none(self):
        one = made_test({p: [row[:1] for row in rows] for p, rows in MISSED.items()})
        figures = evaluated(OURS, [one], num_draws=50, seed=0).figures[0]
        assert not np.isnan(figures.value["gap_lru"]).any()
        assert np.isnan(figures.low["gap_lru"]).all() and np.isnan(figures.high["gap_lru"]).all()


class TestPrompts:
    TRACE = trace_of(np.zeros((6, 1, 1)), 4, seq_id=[0, 0, 3, 3, 7, 7])

    def candidate(self, name: str, held_out: tuple[int, ...], trace: Trace = TRACE) -> Candidate:
        noted = json.loads(json.dumps({"traces": [trained_on("some/where.npz", trace, held_out)]}))
        return Candidate(name=name, folder=Path(name), trained_on=tuple(read_trained_on(noted)))

    def chosen(self, wanted: str, *candidates: Candidate) -> list[int]:
        return choose_prompts(self.TRACE, wanted, candidates, "t.npz").seq_id.tolist()

    def test_what_training_saw_does_not_count(self):
        one, two = self.candidate("a", (3, 7)), self.candidate("b", (0, 7))
        other = self.candidate("c", (), self.TRACE._replace(ids=self.TRACE.ids + 1))
        assert self.chosen("auto", one) == [3, 7]
        assert self.chosen("auto", one, two, other) == [7]
        assert self.chosen("auto", other) == self.chosen("all", one) == [0, 3, 7]
        assert "saw some of them" in choose_prompts(self.TRACE, "all", [one], "t").note
        assert "2 of 3 prompts that training of a held out" in choose_prompts(self.TRACE, "auto", [one], "t").note

    def test_numbers_and_ranges(self):
        assert self.chosen("0,2-5") == [0, 3]
        with pytest.raises(ConfigError, match="has none of the prompts 8-9; it has 0 to 7"):
            self.chosen("8-9")
        for text in ("", "x", "3-", "-3", "1,,2"):
            with pytest.raises(ConfigError, match="is not understood"):
                self.chosen(text)

    def test_nothing_held_out_is_refused(self):
        with pytest.raises(ConfigError, match=r"no prompt of trace t\.npz was held out when a, b was trained on it"):
            self.chosen("auto", self.candidate("a", (3,)), self.candidate("b", (0,)))

    def test_a_trace_is_known_by_its_content(self, tmp_path: Path):
        save_trace(self.TRACE, tmp_path / "t.npz")
        assert fingerprint(load_trace(tmp_path / "t.npz")) == fingerprint(self.TRACE)
        assert fingerprint(self.TRACE) != fingerprint(self.TRACE._replace(seq_id=self.TRACE.seq_id + 1))
        assert read_trained_on({"traces": ["name.npz"]}) == read_trained_on({}) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of one model, and static policies of both; of the first, the second half was held out."""
    folder = tmp_path_factory.mktemp("evaluate")
    for seed, domain in enumerate(("tales", "code")):
        random = np.random.default_rng(seed)
        weight = random.dirichlet(np.full(16, 0.4), 2)
        ids = np.stack([[random.choice(16, 3, replace=False, p=w) for w in weight] for _ in range(400)])
        trace = trace_of(ids, 16, seq_id=np.repeat(np.arange(20), 20))
        trace = trace._replace(meta={"experts": 16, "domain": domain})
        save_trace(trace, folder / f"{domain}.npz")
        held_out = range(10, 20) if domain == "tales" else range(20)
        seen = trace.take(~np.isin(trace.seq_id, held_out)) if domain == "tales" else trace
        (folder / f"of_{domain}").mkdir()
        noted = [trained_on(f"{domain}.npz", trace, held_out)] if domain == "tales" else ["code.npz"]
        save_popularity(folder / f"of_{domain}" / STATIC_NAME, popularity(seen, 2, 16), {"traces": noted})
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Runs `evaluate`; returns exit code, stdout and stderr."""

    def run(
        *options: str,
        traces: tuple[str, ...] = ("tales.npz",),
        policies: tuple[str, ...] = ("of_tales",),
        out: Path = tmp_path / "out",
    ) -> tuple[int, str, str]:
        given_traces = [str(folder / name) for name in traces]
        given_policies = [str(folder / name) for name in policies]
        try:
            base = ["--policy", *given_policies, "--trace", *given_traces, "--out", str(out), "--bootstrap", "50"]
            status = main(["evaluate", *base, *options])
        except SystemExit as end:
            status = int(end.code or 0)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


class TestCommand:
    def test_held_out_prompts_alone(self, run, folder: Path):
        status, out, err = run("--json", "--slots", "4,50%", "--against", "arc,min")
        assert status == 0, err
        assert "the 10 of 20 prompts that training of of_tales held out" in err
        table = json.loads(out)
        assert [(row["policy"], row["slots"], row["slots_per_layer"]) for row in table] == [
            (policy, slots, number)
            for policy in ("arc", "lru", "decayed", "min", "of_tales")
            for slots, number in (("4", 4), ("50%", 8), ("mean", None))
        ]
        assert all(row["prompts"] == 10 and row["tokens"] == 200 and row["test"] == "tales" for row in table)
        # What `replay` says of these prompts.
        trace = joined([load_trace(folder / "tales.npz")])
        replayer = Replayer(trace.take(trace.seq_id >= 10))
        for policy, given_as in (("arc", "arc"), ("of_tales", str(folder / "of_tales"))):
            (result,) = replayer.replay(given_as, [8])
            row = next(r for r in table if r["policy"] == policy and r["slots"] == "50%")
            decode = result.run.decode
            assert row["hit_rate"] == pytest.approx(decode.hits.sum() / decode.accesses.sum(), abs=1e-6)
            assert row["reads_per_token"] == pytest.approx(decode.misses.sum() / 200 / 2, abs=1e-6)
            assert row["refetch_5"] == pytest.approx(decode.refetches.sum() / decode.evictions.sum(), abs=1e-6)

    def test_files_of_one_test(self, run, tmp_path: Path):
        status, out, err = run()
        assert status == 0, err
        files = {path.name for path in (tmp_path / "out").iterdir()}
        plots = {"hit_rate", "gap_closed", "reads_saved", "refetch", "good_decisions", "layers_of_tales"}
        assert files == {"report.md", "rows.csv", *(f"{name}.png" for name in plots)}
        for name in plots:
            data = (tmp_path / "out" / f"{name}.png").read_bytes()
            assert data.startswith(b"\x89PNG\r\n") and data.endswith(b"IEND\xaeB`\x82")
        report = (tmp_path / "out" / "report.md").read_text()
        assert "$ python -m train_policy evaluate --policy" in report and "--bootstrap 50" in report
        assert out.strip() in report
        assert all(f"]({name}.png)" in report for name in plots)
        tables = [block.splitlines() for block in report.split("\n\n") if block.startswith("|")]
        assert len(tables) == 6
        for table in tables:
            assert len({line.count("|") for line in table}) == 1
        with (tmp_path / "out" / "rows.csv").open() as file:
            table = list(csv.DictReader(file))
        # Four defaults, of which 12.5 % is raised to a token's three experts.
        assert [row["slots_per_layer"] for row in table[:5]] == ["3", "4", "6", "8", ""]
        assert {row["policy"] for row in table} == {
            *("lru", "lfu", "lfru", "decayed", "arc", "lecar", "s3fifo", "min", "of_tales")
        }
        for row in table:
            assert float(row["hit_rate_low"]) <= float(row["hit_rate"]) <= float(row["hit_rate_high"])

    def test_domains(self, run, tmp_path: Path):
        options = ("--json", "--against", "lru", "--slots", "4,8", "--test-prompts", "all")
        status, out, err = run(*options, traces=("tales.npz", "code.npz"), policies=("of_tales", "of_code"))
        assert status == 0, err
        assert "of_tales saw some of them in training" in err
        table = json.loads(out)
        assert list(dict.fromkeys(row["test"] for row in table)) == ["all", "tales", "code"]
        gap = {(row["policy"], row["test"]): row["gap_lru"] for row in table if row["slots"] == "mean"}
        # Each domain has its own favourites.
        assert gap["of_tales", "tales"] > gap["of_code", "tales"]
        assert gap["of_code", "code"] > gap["of_tales", "code"]
        assert (tmp_path / "out" / "domains.png").exists()
        report = (tmp_path / "out" / "report.md").read_text()
        assert "| LRU→MIN closed | trained on | tales | code |" in report
        assert "| **of_tales** | tales |" in report and "| **of_code** | not said |" in report

    def test_learned_policies(self, run, folder: Path, tmp_path: Path):
        """A network of random weights, trained on what it says, bare and under guard."""
        trace = load_trace(folder / "tales.npz")
        random = np.random.default_rng(0)
        logits = random.standard_normal((400, 2, 16)).astype(np.float16)
        save_trace(trace._replace(router_logits=logits), tmp_path / "logits.npz")
        saved = random_policy("context", PolicyShape(2, 16, 3), inputs=frozenset({ROUTER_LOGITS}))
        noted = {"traces": [trained_on("tales.npz", trace, [18, 19])]}
        save_policy(tmp_path / "context", dataclasses.replace(saved, meta=noted))
        options = ("--json", "--against", "lru", "--slots", "5")
        given_as = {"traces": (str(tmp_path / "logits.npz"),), "policies": (str(tmp_path / "context"), "of_tales")}
        status, out, err = run(*options, **given_as)
        assert status == 0, err
        assert "the 2 of 20 prompts that training of context, of_tales held out" in err
        bare = {row["policy"]: row for row in json.loads(out)}
        assert bare["context"]["tokens"] == 40
        assert bare["context"]["hit_rate"] <= bare["min"]["hit_rate"]
        assert "| context | tales | router_logits |" in (tmp_path / "out" / "report.md").read_text()
        assert run(*options, "--guard", **given_as)[0] == 0
        status, _, err = run(*options, policies=(str(tmp_path / "context"),))
        assert status == 2 and err.count("\n") == 1 and "--router-logits" in err

    def test_the_same_command_makes_the_same_files(self, run, tmp_path: Path):
        options = ("--against", "lru", "--slots", "4")
        contents = []
        for _ in range(2):
            assert run(*options)[0] == 0
            contents.append({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()})
        assert contents[0] == contents[1]

    def test_a_single_prompt_is_drawn_in_blocks(self, run):
        status, out, err = run("--json", "--against", "lru", "--slots", "4", "--test-prompts", "12")
        assert status == 0, err
        assert "blocks of 16 tokens" in err
        row = json.loads(out)[0]
        assert row["prompts"] == 1 and row["tokens"] == 20
        assert row["hit_rate_low"] < row["hit_rate"] < row["hit_rate_high"]

    def test_traces_of_one_name(self, run, folder: Path, tmp_path: Path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            trace = load_trace(folder / "code.npz")
            save_trace(trace._replace(meta={"experts": 16}), tmp_path / name / "routes.npz")
        traces = tuple(str(tmp_path / name / "routes.npz") for name in ("one", "two"))
        status, out, err = run("--json", "--against", "lru", "--slots", "4", traces=traces)
        assert status == 0, err
        assert list(dict.fromkeys(row["test"] for row in json.loads(out))) == ["all", "one", "two"]

    def test_what_else_is_in_the_folder_stays(self, run, tmp_path: Path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("x")
        assert run("--against", "lru", "--slots", "4")[0] == 0
        assert (tmp_path / "out" / "mine.txt").read_text() == "x"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--slots", "2"), "2 slots per layer are asked for; a token needs 3"),
            (("--slots", "17"), "17 slots per layer"),
            (("--slots", "lots"), "is not understood"),
            (("--slots", "4,,5"), "has an empty entry"),
            (("--against", "best"), "policy 'best' is unknown"),
            (("--against", "min-bypass"), "min-bypass is no fair comparison"),
            (("--against", "static"), "static is no fair comparison"),
            (("--bootstrap", "-1"), "--bootstrap is -1"),
            (("--test-prompts", "30"), "has none of the prompts 30"),
            (("--experts", "8"), "--experts is 8"),
        ],
    )
    def test_mistakes_are_one_line(self, run, tmp_path: Path, options: tuple[str, ...], message: str):
        status, out, err = run(*options)
        assert status == 2 and not out
        assert err.startswith("error: ") and err.count("\n") == 1
        assert message in err
        assert not list(tmp_path.iterdir())

    def test_files_that_cannot_be_used(self, run, folder: Path, tmp_path: Path):
        (tmp_path / "empty").mkdir()
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "policy.json").write_text("{")
        (tmp_path / "small").mkdir()
        save_popularity(tmp_path / "small" / STATIC_NAME, np.ones((2, 8)), {})
        for policies, message in (
            ((str(tmp_path / "empty"),), "holds no policy"),
            ((str(tmp_path / "broken"),), "is not a whole policy"),
            ((str(tmp_path / "small"),), "is of 2 layers x 8 experts, the model has 2 x 16"),
            (("of_tales", "of_tales"), "a policy is given twice"),
        ):
            status, _, err = run(policies=policies)
            assert status == 2 and err.count("\n") == 1 and message in err, err
        for traces, message in (
            (("nothing.npz",), "does not exist"),
            (("tales.npz", "tales.npz"), "a trace is given twice"),
        ):
            status, _, err = run(traces=traces)
            assert status == 2 and err.count("\n") == 1 and message in err, err
        (tmp_path / "file").write_text("x")
        assert "is a file" in run(out=tmp_path / "file")[2]
        assert "cannot be made" in run(out=tmp_path / "no" / "such")[2]


def test_names_of_policies(tmp_path: Path):
    for name in ("a/context", "b/context", "lru"):
        (tmp_path / name).mkdir(parents=True)
        save_popularity(tmp_path / name / STATIC_NAME, np.ones((1, 4)), {})
    assert [c.name for c in read_candidates([tmp_path / "a/context"])] == ["context"]
    both = read_candidates([tmp_path / "a/context", tmp_path / "b/context"])
    assert [c.name for c in both] == ["a/context", "b/context"]
    with pytest.raises(ConfigError, match="has the name of a known policy"):
        read_candidates([tmp_path / "lru"])
