"""Pictures of a benchmark of peers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.peers.tables import OWN_READ_AHEAD


def plot_decode(medians: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Decode tokens/s by limit, a bar per peer and read-ahead, with the range of the runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [line for line in medians if line["runs"]]
    if not lines:
        return
    limits = list(dict.fromkeys(line["limit"] for line in lines))
    names = list(dict.fromkeys(_name(line) for line in lines))
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        own = [line for line in lines if _name(line) == name]
        at = [limits.index(line["limit"]) + (i - (len(names) - 1) / 2) * width for line in own]
        speed = [line["decode_tokens_per_s"] for line in own]
        low = [line["decode_tokens_per_s"] - line["decode_tokens_per_s_min"] for line in own]
        high = [line["decode_tokens_per_s_max"] - line["decode_tokens_per_s"] for line in own]
        axes.bar(at, speed, width, yerr=[low, high], capsize=2, label=name)
    axes.set_xticks(range(len(limits)), ["all in memory" if limit == "none" else limit for limit in limits])
    axes.set_yscale("log")
    axes.set_ylabel("decode, tokens/s")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _name(line: Mapping[str, Any]) -> str:
    ahead = line["read_ahead"]
    return line["peer"] if ahead == OWN_READ_AHEAD else f"{line['peer']}, read-ahead {ahead}"
