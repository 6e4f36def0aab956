"""Plots of an evaluation, as PNG files.

Owns how figures look; numbers come from `figures.py`. Uses matplotlib without its global state, so that importing and
plotting changes nothing for a caller.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from train_policy.evaluate import ALL
from train_policy.figures import Evaluation, Figures, layer_gaps

_DPI = 130
# Candidates stand out; what they are compared with stays in the background.
_STRONG = ("#c1272d", "#0b6fa4", "#2e8b57", "#8e44ad", "#d2691e", "#008080")
_MUTED = ("#7f7f7f", "#9b8f6d", "#6d8f9b", "#a07c94", "#7c9a77", "#b0a27a", "#8888aa", "#aa8888")
_DASHES = ("-", "--", "-.", ":")


def write_plots(evaluation: Evaluation, folder: Path) -> list[str]:
    """Writes all plots and returns their file names."""
    main = evaluation.figures[0]
    plots: dict[str, Figure] = {
        "hit_rate.png": _hit_rates(evaluation),
        "gap_closed.png": _lines(
            evaluation, main, {"gap_lru": "share of LRU→MIN closed", "gap_decayed": "share of decayed→MIN closed"}
        ),
        "reads_saved.png": _lines(evaluation, main, {"reads_saved": "reads saved against decayed"}),
        "refetch.png": _lines(evaluation, main, {"refetch_5": "share of evicted experts asked for within 5 tokens"}),
        "good_decisions.png": _lines(evaluation, main, {"good_decisions": "share of victims that MIN agrees with"}),
    }
    for candidate in evaluation.candidates:
        plots[f"layers_{_file_name(candidate.name)}.png"] = _layers(evaluation, candidate.name)
    if len(evaluation.tests) > 1:
        plots["domains.png"] = _domains(evaluation)
    for name, figure in plots.items():
        FigureCanvasAgg(figure)
        # No version and no date: the same figures make the same bytes.
        figure.savefig(folder / name, dpi=_DPI, metadata={"Software": None})
    return list(plots)


def _file_name(policy: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in policy)


def _shares(evaluation: Evaluation, figures: Figures) -> list[float]:
    """Slots as shares of the experts, in percent: where they stand on the axis."""
    tests = evaluation.tests if figures.name == ALL else [t for t in evaluation.tests if t.name == figures.name]
    return [
        float(np.mean([100 * t.slots[label] / t.num_experts for t in tests if label in t.slots]))
        for label in figures.slots[:-1]
    ]


def _hit_rates(evaluation: Evaluation) -> Figure:
    """Hit rate against slots, a panel per test; all tests together in the first."""
    shown = evaluation.figures
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(4.6 * columns + 1.4, 3.8 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).reshape(-1)
    for panel, figures in zip(panels, shown, strict=False):
        _draw_lines(panel, evaluation, figures, "hit_rate")
        panel.set_title("all tests" if figures.name == ALL else figures.name, fontsize=10)
        panel.set_ylabel("hit rate" if panel in panels[::columns] else "")
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    _legend(figure, panels[0])
    return figure


def _lines(evaluation: Evaluation, figures: Figures, metrics: dict[str, str]) -> Figure:
    figure = Figure(figsize=(5.2 * len(metrics) + 1.4, 3.9), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, (metric, title) in zip(panels, metrics.items(), strict=True):
        _draw_lines(panel, evaluation, figures, metric)
        panel.set_title(title, fontsize=10)
    _legend(figure, panels[0])
    return figure


def _draw_lines(panel: Axes, evaluation: Evaluation, figures: Figures, metric: str) -> None:
    """A line per policy, candidates with their intervals."""
    shares = _shares(evaluation, figures)
    order = np.argsort(shares)
    x = np.array(shares)[order]
    candidates = [candidate.name for candidate in evaluation.candidates]
    num_muted = 0
    for column, policy in enumerate(evaluation.policies):
        y, low, high = (part[metric][:-1, column][order] for part in (figures.value, figures.low, figures.high))
        if policy in candidates:
            place = candidates.index(policy)
            colour = _STRONG[place % len(_STRONG)]
            panel.plot(x, y, color=colour, marker="o", markersize=4, linewidth=2, label=policy, zorder=3)
            panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)
        elif policy == "min":
            panel.plot(x, y, color="black", linestyle="--", linewidth=1.4, label="MIN (ceiling)")
        else:
            colour, dash = _MUTED[num_muted % len(_MUTED)], _DASHES[num_muted % len(_DASHES)]
            panel.plot(x, y, color=colour, linestyle=dash, marker=".", markersize=4, linewidth=1.1, label=policy)
            num_muted += 1
    panel.set_xticks(x, [f"{share:g}%" for share in np.round(x, 1)])
    panel.set_xlabel("slots, share of a layer's experts")
    panel.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _legend(figure: Figure, panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)


def _layers(evaluation: Evaluation, policy: str) -> Figure:
    """Share of LRU→MIN closed per layer and number of slots, a panel per kind of model."""
    kinds = layer_gaps(evaluation, policy)
    widest = max(gap.shape[1] for _, _, gap in kinds)
    tallest = sum(gap.shape[0] for _, _, gap in kinds)
    figure = Figure(figsize=(max(0.42 * widest, 4) + 2, 0.42 * tallest + 1.1 * len(kinds) + 0.4), layout="constrained")
    panels = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
    for panel, (name, slots, gap) in zip(panels, kinds, strict=True):
        title = f"{policy}: share of LRU→MIN closed" + (f", {name}" if len(kinds) > 1 else "")
        _heat_map(figure, panel, gap, title)
        panel.set_xticks(range(gap.shape[1]))
        panel.set_yticks(range(len(slots)), slots)
        panel.set_xlabel("MoE layer")
        panel.set_ylabel("slots")
    return figure


def _domains(evaluation: Evaluation) -> Figure:
    """Mean share of LRU→MIN closed, policies by what they were trained on, tests by what they are of."""
    tests = evaluation.figures[1:]
    columns = [evaluation.policies.index(c.name) for c in evaluation.candidates]
    gap = np.array([[figures.value["gap_lru"][-1, column] for figures in tests] for column in columns])
    figure = Figure(figsize=(1.1 * len(tests) + 4.5, 0.6 * len(columns) + 2.2), layout="constrained")
    panel = figure.subplots()
    _heat_map(figure, panel, gap, "share of LRU→MIN closed, mean over slots")
    labels = [
        c.name if c.domains in ("not said", c.name) else f"{c.name}\n({c.domains})" for c in evaluation.candidates
    ]
    panel.set_xticks(range(len(tests)), [figures.name for figures in tests], rotation=30, ha="right")
    panel.set_yticks(range(len(columns)), labels)
    panel.set_xlabel("tested on")
    panel.set_ylabel("policy (trained on)")
    return figure


def _heat_map(figure: Figure, panel: Axes, values: np.ndarray, title: str) -> None:
    """Numbers on colours; red is worse than LRU, white is where LRU and MIN do not differ."""
    # No colour for what is not known, and no warning about it.
    image = panel.imshow(np.ma.masked_invalid(values), cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            shown = f"{round(value, 2) + 0.0:.2f}".replace("0.", ".")
            panel.text(column, row, shown, ha="center", va="center", fontsize=7)
    panel.set_title(title, fontsize=10)
    panel.tick_params(labelsize=8)
    figure.colorbar(image, ax=panel, fraction=0.03, pad=0.02)
