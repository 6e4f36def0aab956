"""`python -m train_policy replay` from end to end: rows, table, options, and every mistake in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
from random_policies import random_policy
from traces import trace_of

from flashmoe_jax.policy import PolicyShape
from flashmoe_jax.policy.saved import save_policy
from flashmoe_jax.telemetry.trace import DECODE, PREFILL, Trace, save_trace
from train_policy.__main__ import main

ROW = [
    "policy",
    "slots",
    "hit_rate",
    "reads_per_token",
    "refetch_5",
    "regret",
    "accesses",
    "hits",
    "misses",
    "evictions",
]


@pytest.fixture
def trace() -> Trace:
    """Two prompts of ten tokens and what follows, two layers of sixteen experts."""
    random = np.random.default_rng(0)
    ids = np.stack([[random.permutation(16)[:4] for _ in range(2)] for _ in range(60)])
    columns = {"seq_id": np.repeat([0, 1], 30), "phase": np.tile([PREFILL] * 10 + [DECODE] * 20, 2)}
    step = np.concatenate([np.zeros(10), np.arange(1, 21), np.full(10, 21), np.arange(22, 42)])
    return trace_of(ids, 16, step=step, **columns)


@pytest.fixture
def path(trace: Trace, tmp_path: Path) -> Path:
    save_trace(trace, tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


@pytest.fixture
def run(path: Path, capsys: pytest.CaptureFixture):
    """Runs `replay`; returns exit code, stdout and stderr."""

    def run(*options: str, traces: tuple[Path, ...] = (path,)) -> tuple[int, str, str]:
        try:
            status = main(["replay", "--trace", *map(str, traces), *options])
        except SystemExit as end:
            status = int(end.code or 0)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def rows_of(run, *options: str, **more) -> list[dict]:
    status, out, err = run(*options, "--json", **more)
    assert status == 0, err
    return json.loads(out)


class TestReport:
    def test_json_is_a_list_of_rows(self, run):
        rows = rows_of(run, "--policies", "lru,min,min-window:3", "--slots", "4,50%")
        assert [(row["policy"], row["slots"]) for row in rows] == [
            (policy, slots) for policy in ("lru", "min", "min-window:3") for slots in (4, 8)
        ]
        for row in rows:
            assert list(row) == ROW
            assert row["accesses"] == 60 * 2 * 4
            assert row["hits"] + row["misses"] == row["accesses"]
            assert row["reads_per_token"] == pytest.approx(row["misses"] / 60 / 2)
            assert row["hit_rate"] == pytest.approx(row["hits"] / row["accesses"])
            assert 0 <= row["refetch_5"] <= 1
            assert row["regret"] == 1 if row["policy"] == "min" else row["regret"] >= 1

    def test_every_named_policy_runs(self, run):
        names = "random,fifo,lru,lfu,lfu-resident,lfru,decayed,static,arc,lecar,s3fifo,min,min-bypass,min-window:4"
        assert len(rows_of(run, "--policies", names, "--slots", "4,16")) == 28

    def test_table(self, run):
        status, out, err = run("--policies", "lru,min", "--slots", "4")
        lines = out.splitlines()
        assert status == 0
        assert lines[0].split() == ["policy", "slots", "hit", "rate", "reads/token", "refetch<=5", "regret"]
        assert [line.split()[:2] for line in lines[1:]] == [["lru", "4"], ["min", "4"]]
        assert len({len(line) for line in lines}) == 1
        assert "60 tokens, 2 layers x 16 experts, 4 per token" in err

    def test_nothing_evicted_is_null(self, run):
        (row,) = rows_of(run, "--policies", "lru", "--slots", "100%")
        assert row["evictions"] == 0 and row["refetch_5"] is None


class TestOptions:
    def test_as_engine_reports_prefill_apart(self, run):
        plain = rows_of(run, "--policies", "lru", "--slots", "4")[0]
        (row,) = rows_of(run, "--policies", "lru", "--slots", "4", "--as-engine")
        assert list(row) == [*ROW, "prefill"]
        assert list(row["prefill"]) == ROW[2:]
        assert row["accesses"] == 40 * 2 * 4
        # A prompt asks for each expert once.
        assert row["prefill"]["accesses"] <= 2 * 2 * 16
        assert row["misses"] + row["prefill"]["misses"] < plain["misses"]
        _, table, _ = run("--policies", "lru", "--slots", "4", "--as-engine")
        assert "prefill hit rate" in table

    def test_as_engine_without_prompts_says_so(self, run, trace: Trace, tmp_path: Path):
        save_trace(trace._replace(phase=np.full(60, DECODE)), tmp_path / "decode.npz")
        _, _, err = run("--policies", "lru", "--slots", "4", "--as-engine", traces=(tmp_path / "decode.npz",))
        assert "no prefill" in err

    def test_staging_lets_prompts_replace_more(self, run):
        few = rows_of(run, "--policies", "decayed", "--slots", "4", "--as-engine", "--staging", "1")[0]
        many = rows_of(run, "--policies", "decayed", "--slots", "4", "--as-engine", "--staging", "16")[0]
        assert few["prefill"]["evictions"] < many["prefill"]["evictions"]

    def test_reset_starts_every_prompt_cold(self, run, trace: Trace, tmp_path: Path):
        (warm,) = rows_of(run, "--policies", "lru", "--slots", "100%")
        (cold,) = rows_of(run, "--policies", "lru", "--slots", "100%", "--reset")
        assert warm["misses"] == 32
        assert cold["misses"] == 64

    def test_per_access(self, run):
        assert rows_of(run, "--policies", "lru", "--slots", "1", "--per-access")[0]["accesses"] == 480

    def test_several_traces_are_replayed_one_after_the_other(self, run, path: Path):
        (row,) = rows_of(run, "--policies", "lru", "--slots", "100%", traces=(path, path))
        assert row["accesses"] == 960
        assert row["misses"] == 32

    def test_the_seed_changes_random(self, run):
        first, again, other = (
            rows_of(run, "--policies", "random", "--slots", "4,6,8,10", "--seed", seed) for seed in ("1", "1", "2")
        )
        assert first == again != other

    def test_static_takes_its_own_trace_or_says_so(self, run, trace: Trace, tmp_path: Path):
        _, _, err = run("--policies", "static", "--slots", "4")
        assert "hindsight" in err
        other = tmp_path / "other.npz"
        save_trace(trace._replace(ids=(trace.ids + 5) % 16), other)
        hindsight, fitted = (
            rows_of(run, "--policies", "static", "--slots", "8", *more) for more in ((), ("--policy-trace", str(other)))
        )
        assert hindsight[0]["misses"] < fitted[0]["misses"]

    def test_a_fitted_policy_is_given_as_its_folder(self, run, path: Path, tmp_path: Path, capsys):
        assert main(["fit", "--kind", "static", "--trace", str(path), "--out", str(tmp_path / "fitted")]) == 0
        capsys.readouterr()
        rows = rows_of(run, "--policies", f"{tmp_path / 'fitted'},static", "--slots", "8")
        assert rows[0]["policy"] == str(tmp_path / "fitted")
        assert rows[0]["misses"] == rows[1]["misses"]

    @pytest.mark.parametrize(
        ("options", "is_guarded"),
        [([], False), (["--as-engine"], True), (["--guard", "on"], True), (["--as-engine", "--guard", "off"], False)],
    )
    def test_a_learned_policy_is_under_guard_as_in_the_engine(
        self, run, tmp_path: Path, options: list[str], is_guarded: bool
    ):
        save_policy(tmp_path / "learned", random_policy("shared", PolicyShape(2, 16, 4)))
        rows = rows_of(run, "--policies", f"{tmp_path / 'learned'},decayed", "--slots", "8", *options)
        assert ("fallback_share" in rows[0]) == is_guarded
        assert "fallback_share" not in rows[1]


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--policies", "lru,nonsense", "--slots", "4"], "policy 'nonsense' is unknown; choose of lru, "),
            (["--policies", "min-window", "--slots", "4"], "write min-window:W"),
            (["--policies", "min-window:0", "--slots", "4"], "write min-window:W"),
            (["--policies", "lru,,min", "--slots", "4"], "empty entry"),
            (["--slots", "8,many"], "slots 'many' is not understood; write for example 16 or 25%"),
            (["--slots", "-3"], "slots '-3' is not understood"),
            (["--slots", "3"], "3 slots per layer are asked for; a token needs 4 experts and a layer has 16"),
            (["--slots", "10%"], "1 slots per layer are asked for"),
            (["--slots", "17"], "give 4 to 16"),
            (["--slots", "4", "--experts", "8"], "16 experts per layer and --experts is 8"),
            (["--slots", "4", "--experts", "0"], "must be at least 1"),
            (["--slots", "4", "--staging", "2"], "--staging has an effect with --as-engine only"),
            (["--slots", "4", "--staging", "0", "--as-engine"], "must be at least 1"),
            (["--slots", "4", "--as-engine", "--per-access"], "exclude each other"),
            (["--slots", "4", "--seed", "-1"], "must not be negative"),
            (["--slots", "4", "--as-engine", "--policies", "arc"], "policy arc is of per-access caches"),
            (["--slots", "4", "--policy-trace", "x.npz"], "has an effect on policy static only"),
            (["--slots", "4", "--guard", "off"], "--guard has an effect on learned policies only"),
            ([], "the following arguments are required: --slots"),
        ],
    )
    def test_is_one_line(self, run, options: list[str], message: str):
        assert_one_line(run(*options), message)

    def test_no_such_trace(self, run, tmp_path: Path):
        assert_one_line(run("--slots", "4", traces=(tmp_path / "no.npz",)), "does not exist")

    def test_ids_out_of_range(self, run, trace: Trace, tmp_path: Path):
        save_trace(trace._replace(meta={"experts": 12}), tmp_path / "bad.npz")
        assert_one_line(run("--slots", "4", traces=(tmp_path / "bad.npz",)), "expert ids up to 15 and a layer has 12")

    def test_static_of_another_model(self, run, trace: Trace, tmp_path: Path):
        save_trace(trace._replace(ids=trace.ids[:, :1]), tmp_path / "other.npz")
        options = ("--slots", "4", "--policies", "static", "--policy-trace", str(tmp_path / "other.npz"))
        assert_one_line(run(*options), "use a trace of this model")

    def test_fitted_policy_of_another_model(self, run, trace: Trace, tmp_path: Path, capsys):
        save_trace(trace._replace(ids=trace.ids[:, :1]), tmp_path / "other.npz")
        main(["fit", "--kind", "static", "--trace", str(tmp_path / "other.npz"), "--out", str(tmp_path / "fitted")])
        capsys.readouterr()
        assert_one_line(run("--slots", "4", "--policies", str(tmp_path / "fitted")), "use a trace of this model")

    def test_traces_of_different_models(self, run, path: Path, trace: Trace, tmp_path: Path):
        save_trace(trace._replace(ids=trace.ids[:, :1]), tmp_path / "other.npz")
        assert_one_line(run("--slots", "4", traces=(path, tmp_path / "other.npz")), "different models")


def assert_one_line(outcome: tuple[int, str, str], message: str) -> None:
    status, out, err = outcome
    assert status == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and message in last, err


def test_help_needs_neither_jax_nor_numba():
    import subprocess
    import sys

    code = (
        "import sys, train_policy.__main__ as m\n"
        "try: m.main(['replay', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'numba'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
