"""What must be set before JAX starts: memory preallocation on a GPU, and the persistent compilation cache.

Nothing here imports JAX's backend; `configure_backend` is for a command's first lines. A variable that the user set
is left as it is.
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from flashmoe_jax.engine.budget import Budget


def configure_backend(device_budget: str | None) -> None:
    """Sets JAX's GPU preallocation to the declared budget, so that it takes no more than was declared.

    Args:
        device_budget: as given by the user. In bytes it becomes the preallocated share; as a share of the experts or
            in slots, and without a budget, preallocation is switched off and memory is taken as it is needed.
    """
    if not _has_gpu_plugin() or "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:
        return
    budget = Budget.parse(device_budget) if device_budget is not None else None
    total_bytes = _gpu_memory_bytes()
    if budget is None or budget.num_bytes is None or total_bytes is None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{min(1.0, budget.num_bytes / total_bytes):.4f}"


def enable_compilation_cache(cache_dir: Path) -> None:
    """Keeps compiled programs, small ones too, in `cache_dir` for the next start."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _has_gpu_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


def _gpu_memory_bytes() -> int | None:
    """Memory of the first GPU, asked of the driver's own tool; None where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = answer.stdout.split()
    return int(lines[0]) << 20 if answer.returncode == 0 and lines else None
