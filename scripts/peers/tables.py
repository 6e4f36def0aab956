"""From runs to rows, medians and the ratios between peers.

Owns the columns of the CSV files. A run is a dict as `child.run_peer` returns it, with `peer`, `limit`, `read_ahead`,
`run` and what the driver measured around it; a run that failed has `error` instead of times. Invariant: a ratio is of
two medians of one benchmark run; where a side is missing there is no ratio.
"""

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OWN_READ_AHEAD = "own"
NO_LIMIT = "none"
KEY = ("peer", "limit", "read_ahead")
_MEASURED = (
    "load_s",
    "prefill_s",
    "load_prefill_s",
    "decode_tokens",
    "decode_tokens_per_s",
    "decode_median_s",
    "decode_max_s",
    "import_s",
    "compile_s",
    "peak_rss_bytes",
    "cgroup_peak_bytes",
    "drive_read_bytes_per_s",
    "memory_read_bytes_per_s",
    "slots_per_layer",
    "hit_rate",
    "decode_read_bytes_per_token",
)
RUN_COLUMNS = (*KEY, "run", *_MEASURED, "page_cache", "error")
MEDIAN_COLUMNS = (*KEY, "runs", *_MEASURED, "decode_tokens_per_s_min", "decode_tokens_per_s_max")
RATIO_COLUMNS = ("what", "limit", "numerator", "denominator", "ratio")


def run_row(run: Mapping[str, Any]) -> dict[str, Any]:
    """One line of runs.csv; what is not known stays out."""
    row = {name: run[name] for name in RUN_COLUMNS if run.get(name) is not None}
    if "error" in row:
        return row
    decode_s, facts = run["decode_s"], run["facts"]
    row |= {
        "load_prefill_s": run["load_s"] + run["prefill_s"],
        "decode_tokens": len(decode_s),
        "decode_tokens_per_s": len(decode_s) / sum(decode_s),
        "decode_median_s": statistics.median(decode_s),
        "decode_max_s": max(decode_s),
        "compile_s": run["load_compile_s"] + run["prefill_compile_s"] + run["decode_compile_s"],
    }
    if "slots_per_layer" in facts:
        row |= {
            "slots_per_layer": facts["slots_per_layer"],
            "hit_rate": facts["hits"] / facts["accesses"],
            "decode_read_bytes_per_token": facts["read_bytes"] / len(decode_s),
        }
    return row


def median_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per peer, limit and read-ahead, over its runs without error; in the order of the first run."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        group = groups.setdefault(tuple(row[name] for name in KEY), [])
        if "error" not in row:
            group.append(row)
    medians = []
    for key, group in groups.items():
        line: dict[str, Any] = dict(zip(KEY, key, strict=True)) | {"runs": len(group)}
        for name in _MEASURED:
            if values := [row[name] for row in group if name in row]:
                line[name] = statistics.median(values)
        if group:
            speeds = [row["decode_tokens_per_s"] for row in group]
            line |= {"decode_tokens_per_s_min": min(speeds), "decode_tokens_per_s_max": max(speeds)}
        medians.append(line)
    return medians


def ratio_rows(medians: Sequence[Mapping[str, Any]], dense_bytes: float | None) -> list[dict[str, Any]]:
    """flashmoe's medians over those of the others.

    Args:
        medians: of `median_rows`.
        dense_bytes: of flashmoe's dense weights, for the time to read them at the drive's rate; None if unknown.

    Returns:
        Lines with `what`, `limit`, both sides and `ratio`. Of speeds more than 1 is better, of times less.
    """
    lines = []
    for own in (line for line in medians if line["peer"] == "flashmoe" and line["runs"]):
        others = [line for line in medians if line["limit"] == own["limit"] and line["runs"]]
        llama = [line for line in others if line["peer"] == "llama.cpp"]
        sides = {
            "llama.cpp at its best read-ahead": llama,
            "llama.cpp as it comes": [line for line in llama if line["read_ahead"] == OWN_READ_AHEAD],
            "transformers with accelerate": [line for line in others if line["peer"] == "accelerate"],
        }
        for side, candidates in sides.items():
            if not candidates:
                continue
            speed = max(line["decode_tokens_per_s"] for line in candidates)
            median = min(line["decode_median_s"] for line in candidates)
            lines += [
                _ratio("decode tokens/s", own, side, own["decode_tokens_per_s"], speed),
                _ratio("decode tokens/s by the median token", own, side, 1 / own["decode_median_s"], 1 / median),
                *(
                    _ratio(what, own, side, own[name], min(line[name] for line in candidates))
                    for what, name in (("ready to prefill, s", "load_s"), ("load + prefill, s", "load_prefill_s"))
                ),
            ]
        if dense_bytes is not None and "drive_read_bytes_per_s" in own:
            at_drive_s = dense_bytes / own["drive_read_bytes_per_s"]
            lines.append(_ratio("ready to prefill, s", own, "dense bytes at drive rate", own["load_s"], at_drive_s))
    return lines


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows under a header; numbers with six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_cell(row.get(name)) for name in columns])


def _ratio(what: str, own: Mapping[str, Any], side: str, value: float, other: float) -> dict[str, Any]:
    return {
        "what": f"{what}: flashmoe ÷ {side}",
        "limit": own["limit"],
        "numerator": value,
        "denominator": other,
        "ratio": value / other,
    }


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
