"""Speed of the CPU kernels at an expert's shape, next to the memory read rate measured in the same run.

Prints one CSV row per (code, tokens): bytes of weights per second, their share of the memory read rate, and floating
point operations per second. One token reads every weight once, from memory: the records together are far larger than
the caches. Rounds are interleaved, so that a drift of the machine meets all rows alike; medians are reported, warm-up
and compilation excluded.
"""

import argparse
import csv
import ctypes
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashmoe_jax import native
from flashmoe_jax.experts.ffn import native as kernels
from flashmoe_jax.experts.ffn import reference
from flashmoe_jax.experts.record import RecordLayout

# Reads `size` bytes as `streams` interleaved streams, each with its own sum, so that only loads limit it.
READER = r"""
#include <stddef.h>
#include <stdint.h>
typedef uint64_t vec __attribute__((vector_size(32)));
uint64_t sum_streams(const char* base, size_t size, int streams) {
  const size_t part = size / (size_t)streams / 256 * 256;
  vec total[4] = {{0}, {0}, {0}, {0}};
  for (size_t i = 0; i < part; i += 64) {
    for (int s = 0; s < streams; ++s) {
      const char* at = base + (size_t)s * part + i;
      __builtin_prefetch(at + 1024, 0, 3);
      total[s & 3] += *(const vec*)at + *(const vec*)(at + 32);
    }
  }
  const vec all = total[0] + total[1] + total[2] + total[3];
  return all[0] + all[1] + all[2] + all[3];
}
"""
STREAMS = (1, 2, 4)


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


def memory_reader() -> Callable[[np.ndarray, int], float]:
    """Returns a function that reads a block with all cores and gives bytes per second."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("error: the memory read rate needs a C compiler")
    folder = tempfile.mkdtemp()
    source, library = Path(folder) / "reader.c", Path(folder) / "reader.so"
    source.write_text(READER)
    subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
    sum_streams = ctypes.CDLL(str(library)).sum_streams
    sum_streams.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_threads = len(os.sched_getaffinity(0))

    def rate(block: np.ndarray, streams: int) -> float:
        part = block.nbytes // num_threads // 4096 * 4096
        threads = [
            threading.Thread(target=sum_streams, args=(block.ctypes.data + i * part, part, streams))
            for i in range(num_threads)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return part * num_threads / (time.perf_counter() - began)

    return rate


def make_rows(layout: RecordLayout, num_rows: int) -> np.ndarray:
    """Random records; ordinary numbers, as denormals or NaN could have another speed."""
    random = np.random.default_rng(0)
    one = layout.pack({f.name: (random.normal(size=f.shape) * 0.02).astype(jnp.dtype(f.dtype)) for f in layout.fields})
    return np.tile(one, (num_rows, 1))


def jitted(code: str, tokens: int, layout: RecordLayout, isa: str) -> Any:
    """`run(h_TD, rows, row)`: pairs of one token, or a group of several with one expert."""
    pairs = functools.partial(kernels.expert_ffn, isa=isa) if code == "kernel" else reference.expert_ffn
    group = functools.partial(kernels.expert_ffn_group, isa=isa) if code == "kernel" else reference.expert_ffn_group
    if tokens == 1:
        return jax.jit(
            lambda h, rows, row: pairs(
                jnp.zeros((1, row.shape[1], h.shape[1])), h, rows, row, jnp.ones(row.shape, bool), layout.fields
            )
        )
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
    host_rows = make_rows(layout, max(4 * X, 1 + (512 << 20) // layout.record_bytes))
    rows = jax.device_put(host_rows, may_alias=True)
    reader = memory_reader()
    isas = arguments.isa.split(",")
    runs: dict[tuple[str, int], Any] = {}
    for tokens in map(int, arguments.tokens.split(",")):
        for isa in isas:
            runs[f"kernel {library.isa if isa == 'auto' else isa}", tokens] = jitted("kernel", tokens, layout, isa)
        if not arguments.no_xla:
            runs["xla", tokens] = jitted("xla", tokens, layout, "auto")
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    rates: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    next_row = 0
    for round_id in range(-1, arguments.rounds):  # the first one warms up
        for streams in STREAMS:
            rate = reader(host_rows, streams)
            if round_id >= 0:
                rates[streams].append(rate)
        for (code, tokens), run in runs.items():
            h_TD = np.random.default_rng(tokens).normal(size=(tokens, D)).astype(np.float32)
            row = ((next_row + np.arange(X, dtype=np.int32)) % len(host_rows)).reshape(1, X)
            next_row = (next_row + X) % len(host_rows)
            began = time.perf_counter()
            run(h_TD, rows, row).block_until_ready()
            if round_id >= 0:
                seconds[code, tokens].append(time.perf_counter() - began)
    medians = {streams: statistics.median(values) for streams, values in rates.items()}
    best = max(medians, key=lambda streams: medians[streams])
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
