"""transformers, with accelerate's disk offload where memory is limited; all in memory where it is not.

Of the limit, what is left after `--reserve` holds layers; the others are on the disk. transformers fuses the experts of
a layer into one tensor, so it writes the offloaded layers to `--offload` while it loads, and that is part of loading.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.peers.child import build_parser, run_and_print


class Accelerate:
    """A `Peer` over `AutoModelForCausalLM`."""

    def import_packages(self) -> dict[str, str]:
        import accelerate  # noqa: F401
        import torch
        import transformers

        self._torch, self._transformers = torch, transformers
        return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}

    def load(self, args: argparse.Namespace) -> None:
        torch = self._torch
        torch.set_num_threads(args.threads)
        torch.set_grad_enabled(False)
        self._cache = self._transformers.DynamicCache()
        options: dict[str, Any] = {}
        if args.memory_limit is not None:
            options = {
                "device_map": "auto",
                "max_memory": {"cpu": args.memory_limit - args.reserve},
                "offload_folder": str(args.offload),
            }
        loader = self._transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(args.model, dtype=torch.bfloat16, **options).eval()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        return self._forward(ids, self._cache)

    def decode(self, token: int) -> np.ndarray:
        return self._forward([token], self._cache)

    def warm_up(self, ids: Sequence[int]) -> None:
        self._forward(ids, self._transformers.DynamicCache())

    def compile_s(self) -> float:
        return 0.0

    def facts(self) -> dict[str, Any]:
        device_map = getattr(self._model, "hf_device_map", {})
        return {"modules_on_disk": sum(place == "disk" for place in device_map.values())}

    def close(self) -> None:
        del self._model, self._cache

    def _forward(self, ids: Sequence[int], cache: Any) -> np.ndarray:
        ids_BT = self._torch.tensor([list(ids)])
        output = self._model(ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: np.ndarray = output.logits[0, -1].float().numpy()
        return logits


def main(argv: list[str] | None = None) -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--memory-limit", type=int, metavar="BYTES", help="of the process (default: none)")
    parser.add_argument("--reserve", type=int, default=3 << 30, metavar="BYTES", help="of it not for layers (3 GiB)")
    parser.add_argument("--offload", type=Path, metavar="DIR", help="folder for layers that are not in memory")
    return run_and_print(Accelerate(), parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
