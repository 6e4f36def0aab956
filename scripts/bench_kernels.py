"""Speed of the CPU kernels at an expert's shape, next to the memory read rate measured in the same run.

Prints one CSV row per (code, tokens): bytes of weights per second, their share of the memory read rate, and floating
point operations per second. One token reads every weight once, from memory: the records together are far larger than
the caches. Rounds are interleaved, so that a drift of the machine meets all rows alike; medians are reported, warm-up
and compilation excluded.
"""

import argparse
import csv
import functools
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashmoe_jax import native
from flashmoe_jax.experts.ffn import native as kernels
from flashmoe_jax.experts.ffn import reference
from flashmoe_jax.experts.record import RecordLayout
from flashmoe_jax.native import streams
from flashmoe_jax.probe.block import BLOCK_BYTES, make_records
from flashmoe_jax.probe.kernel import RowCycle, one_token_run


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048, help="model width D (default 2048, OLMoE)")
    parser.add_argument("--hidden", type=int, default=1024, help="expert hidden width F (default 1024, OLMoE)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--experts", type=int, default=8, help="experts per token (default 8)")
    parser.add_argument("--tokens", default="1,8,64", help="token counts, comma separated (default 1,8,64)")
    parser.add_argument(
        "--isa", default="auto", help=f"instruction sets, comma separated, of {', '.join(native.ISA_LEVELS)}"
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument("--no-xla", action="store_true", help="leave out the slow XLA code")
    return parser


def jitted(code: str, tokens: int, layout: RecordLayout, isa: str) -> Any:
    """`run(h_TD, rows, row)`: pairs of one token, or a group of several with one expert."""
    is_kernel = code == "kernel"
    if tokens == 1:
        return one_token_run(
            functools.partial(kernels.expert_ffn, isa=isa) if is_kernel else reference.expert_ffn, layout
        )
    group = functools.partial(kernels.expert_ffn_group, isa=isa) if is_kernel else reference.expert_ffn_group
    token_G, weight_G = np.arange(tokens, dtype=np.int32), np.ones(tokens, np.float32)
    return jax.jit(
        lambda h, rows, row: group(jnp.zeros(h.shape), h, rows, row[0, 0], token_G, weight_G, layout.fields)[0]
    )


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    library = native.load()
    if not library.is_loaded:
        print(f"error: no CPU kernels: {library.reason}", file=sys.stderr)
        return 2
    D, F, X = arguments.width, arguments.hidden, arguments.experts
    shapes = (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F)))
    layout = RecordLayout.for_experts(shapes, arguments.dtype)
    num_rows = max(4 * X, 1 + BLOCK_BYTES // layout.record_bytes)
    host_rows = make_records(layout, num_rows)
    rows = jax.device_put(host_rows, may_alias=True)
    read = streams.library_reader()
    assert read is not None, "the library was loaded and has no memory reader"
    isas = arguments.isa.split(",")
    runs: dict[tuple[str, int], Any] = {}
    for tokens in map(int, arguments.tokens.split(",")):
        for isa in isas:
            runs[f"kernel {library.isa if isa == 'auto' else isa}", tokens] = jitted("kernel", tokens, layout, isa)
        if not arguments.no_xla:
            runs["xla", tokens] = jitted("xla", tokens, layout, "auto")
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    rates: dict[int, list[float]] = {count: [] for count in streams.STREAMS}
    cycle = RowCycle(num_rows)
    for round_id in range(-1, arguments.rounds):  # the first one warms up
        for count in streams.STREAMS:
            rate = streams.read_rate(host_rows, count, read)
            if round_id >= 0:
                rates[count].append(rate)
        for (code, tokens), run in runs.items():
            h_TD = np.random.default_rng(tokens).normal(size=(tokens, D)).astype(np.float32)
            row = cycle.take(X)
            began = time.perf_counter()
            run(h_TD, rows, row).block_until_ready()
            if round_id >= 0:
                seconds[code, tokens].append(time.perf_counter() - began)
    medians = {count: statistics.median(values) for count, values in rates.items()}
    best = max(medians, key=lambda count: medians[count])
    writer = csv.writer(sys.stdout)
    writer.writerow(
        "code,tokens,experts,dtype,width,hidden,ms,weight_gb_per_s,share_of_memory_rate,gflop_per_s,memory_gb_per_s,"
        "memory_streams".split(",")
    )
    weights = 3 * D * F
    itemsize = jnp.dtype(arguments.dtype).itemsize
    for (code, tokens), values in seconds.items():
        experts, duration = (X if tokens == 1 else 1), statistics.median(values)
        read_rate = experts * weights * itemsize / duration
        writer.writerow(
            [
                *(code, tokens, experts, arguments.dtype, D, F),
                *(f"{duration * 1e3:.3f}", f"{read_rate / 1e9:.2f}", f"{read_rate / medians[best]:.3f}"),
                *(f"{2 * tokens * experts * weights / duration / 1e9:.1f}", f"{medians[best] / 1e9:.2f}", best),
            ]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
