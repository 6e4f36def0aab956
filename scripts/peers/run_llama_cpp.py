"""llama.cpp through llama-cpp-python: memory-mapped weights, all cores, logits of the last token only."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.peers.child import build_parser, context_tokens, run_and_print


class LlamaCpp:
    """A `Peer` over `llama_cpp.Llama`, fed with ids."""

    def import_packages(self) -> dict[str, str]:
        import llama_cpp

        self._library = llama_cpp
        features = llama_cpp.llama_print_system_info().decode().split("|")
        used = [part.strip().removesuffix(" = 1") for part in features if part.strip().endswith("= 1")]
        return {"llama-cpp-python": llama_cpp.__version__, "llama.cpp features": " ".join(used)}

    def load(self, args: argparse.Namespace) -> None:
        self._llama = self._library.Llama(
            str(args.model),
            n_ctx=context_tokens(args),
            n_batch=512,
            n_threads=args.threads,
            n_threads_batch=args.threads,
            use_mmap=True,
            use_mlock=False,
            verbose=False,
        )

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        return self._eval(ids)

    def decode(self, token: int) -> np.ndarray:
        return self._eval([token])

    def warm_up(self, ids: Sequence[int]) -> None:
        length = self._llama.n_tokens
        self._eval(ids)
        self._llama.n_tokens = length  # the next eval removes what is cached behind it

    def compile_s(self) -> float:
        return 0.0

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._llama.close()

    def _eval(self, ids: Sequence[int]) -> np.ndarray:
        self._llama.eval(ids)
        logits = self._library.llama_get_logits_ith(self._llama.ctx, -1)
        return np.ctypeslib.as_array(logits, (self._llama.n_vocab(),)).copy()


def main(argv: list[str] | None = None) -> int:
    return run_and_print(LlamaCpp(), build_parser(__doc__ or "").parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
