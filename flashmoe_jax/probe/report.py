"""The probe's results as one object for a program and as tables for a person. Measures and predicts nothing."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_LIMITS = {"drive": "drive", "copy": "copy to the device", "memory": "memory"}


def print_tables(result: Mapping[str, Any]) -> None:
    """Rates, predictions, the recommendation and the notes.

    Args:
        result: the `--json` object.
    """
    # A pipe has no width of its own; a table that is folded to 80 columns cannot be read.
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(_rates(result))
    if result.get("predictions"):
        console.print(_predictions(result["predictions"]))
    if recommended := result.get("recommended"):
        budget = next(
            f"--{name.replace('_', '-')} {recommended[name]}"
            for name in ("memory_limit", "device_budget")
            if name in recommended
        )
        console.print(f"recommended: {budget} ({recommended['slots']} slots per layer): {recommended['why']}")
    for note in result["notes"]:
        console.print(f"note: {note}")


def _rates(result: Mapping[str, Any]) -> Table:
    machine = result["machine"]
    limit = machine["cgroup_limit_bytes"]
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{machine['cores']} cores, {machine['memory_available_bytes'] / 2**30:.1f} of "
        f"{machine['memory_total_bytes'] / 2**30:.1f} GiB free"
        + (f", control group limit {limit / 2**30:.1f} GiB" if limit else ""),
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("GB/s", justify="right")
    for depth, rate in result["drive_read_bytes_per_s"].items():
        table.add_row(f"drive, {depth} read{'s' if depth != '1' else ''} in flight", _gb(rate))
    memory, kernel = result["memory_read_bytes_per_s"], result["kernel_bytes_per_s"]
    table.add_row("memory, read by all cores", _gb(memory))
    table.add_row(f"expert kernel, one token ({kernel / memory:.0%} of memory)", _gb(kernel))
    table.add_row("copy of a record to the device", _gb(result["device_copy_bytes_per_s"]))
    return table


def _predictions(predictions: list[Mapping[str, Any]]) -> Table:
    """One row per budget, one column per drive."""
    drives = list(dict.fromkeys(p["drive"] for p in predictions))
    table = Table(box=SIMPLE_HEAD, title="tokens/s of decode, and what limits it", title_justify="left")
    for title in ("budget", "slots", "hit rate"):
        table.add_column(title, justify="right")
    for drive in drives:
        table.add_column("drive as measured" if drive == "measured" else drive, justify="right")
    for budget in dict.fromkeys(p["budget"] for p in predictions):
        row = [p for p in predictions if p["budget"] == budget]
        cells = [f"{p['tokens_per_s']:.2f} {_LIMITS[p['bound']]}" for p in row]
        table.add_row(budget, str(row[0]["slots_per_layer"]), f"{row[0]['hit_rate']:.1%}", *cells)
    return table


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}"
