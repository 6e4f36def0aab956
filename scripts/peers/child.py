"""One measured run of one peer, in a process of its own.

Owns the protocol that all peers share: import, load, prefill, warm-up where everything shall be resident, decode of
ids that are given. Needs numpy and the standard library only, as each peer runs in the environment that has it.
Invariant: what a phase reports is its wall time less the compilation inside it, which is reported apart; every phase
ends with logits on the host.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Tokens of the warm-up prompt: enough that every expert of a random router is chosen by some.
WARM_UP_TOKENS = 512


class Peer(Protocol):
    """What is measured. `args` is that of `build_parser`, with the peer's own options."""

    def import_packages(self) -> dict[str, str]:
        """Imports what is needed; versions by package."""

    def load(self, args: argparse.Namespace) -> None:
        """Makes the model ready for a prompt."""

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """The prompt; logits `[V]` float32 after its last token."""

    def decode(self, token: int) -> np.ndarray:
        """One more token; logits `[V]` float32."""

    def warm_up(self, ids: Sequence[int]) -> None:
        """Touches the weights that these ids need, and leaves the sequence as it is."""

    def compile_s(self) -> float:
        """Seconds spent in tracing and compiling until now."""

    def facts(self) -> dict[str, Any]:
        """What else is to be reported, after decode."""

    def close(self) -> None:
        """Frees what was loaded."""


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="file or directory of the model")
    parser.add_argument("--tokens", type=Path, required=True, metavar="NPY", help="int32 ids: prompt, decode, warm-up")
    parser.add_argument("--prefill-tokens", type=int, default=32, metavar="N", help="(default %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=32, metavar="N", help="(default %(default)s)")
    parser.add_argument("--max-decode-s", type=float, default=120, metavar="S", help="decode ends then (default 120)")
    parser.add_argument("--resident", action="store_true", help="touch all weights between prefill and decode")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="(default: all cores)")
    parser.add_argument("--logits", type=Path, metavar="NPY", help="write logits [1 + decode tokens, V] float32 there")
    return parser


def run_peer(peer: Peer, args: argparse.Namespace) -> dict[str, Any]:
    """Runs all phases.

    Returns:
        Seconds by phase, `decode_s` one per token, `peak_rss_bytes`, `versions` and the peer's own facts.
    """
    ids = [int(i) for i in np.load(args.tokens)]
    prompt, rest = ids[: args.prefill_tokens], ids[args.prefill_tokens :]
    fed, warm = rest[: args.decode_tokens], rest[args.decode_tokens :]
    began = time.perf_counter()
    versions = {"python": platform.python_version()} | peer.import_packages()
    result: dict[str, Any] = {"import_s": time.perf_counter() - began}
    began, compiled = time.perf_counter(), peer.compile_s()
    peer.load(args)
    result["load_compile_s"] = peer.compile_s() - compiled
    result["load_s"] = time.perf_counter() - began - result["load_compile_s"]
    began, compiled = time.perf_counter(), peer.compile_s()
    logits = [peer.prefill(prompt)]
    result["prefill_compile_s"] = peer.compile_s() - compiled
    result["prefill_s"] = time.perf_counter() - began - result["prefill_compile_s"]
    if args.resident:
        peer.warm_up(warm)
    result["decode_s"], result["decode_compile_s"] = [], 0.0
    first = time.perf_counter()
    for token in fed:
        began, compiled = time.perf_counter(), peer.compile_s()
        logits.append(peer.decode(token))
        compile_s = peer.compile_s() - compiled
        result["decode_compile_s"] += compile_s
        result["decode_s"].append(time.perf_counter() - began - compile_s)
        if time.perf_counter() - first > args.max_decode_s:
            break
    if args.logits is not None:
        np.save(args.logits, np.stack(logits).astype(np.float32))
    result |= {"peak_rss_bytes": peak_rss_bytes(), "versions": versions, "facts": peer.facts()}
    peer.close()
    return result


def run_and_print(peer: Peer, args: argparse.Namespace) -> int:
    """Runs all phases and prints the result as the last line of stdout."""
    result = run_peer(peer, args)
    sys.stdout.flush()
    print(json.dumps(result), flush=True)
    return 0


def context_tokens(args: argparse.Namespace) -> int:
    """Room for the sequence and, behind or beside it, for the warm-up."""
    return int(args.prefill_tokens + args.decode_tokens + (WARM_UP_TOKENS if args.resident else 0))


def peak_rss_bytes() -> int:
    """Most resident memory that this process ever had, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
