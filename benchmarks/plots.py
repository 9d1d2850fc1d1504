"""One picture for each benchmark: its ratios, with their spread."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.pairs import Row


def draw(tables: Mapping[str, Sequence[Row]], folder: Path, hardware: str) -> list[Path]:
    """NAME.svg for every benchmark that has rows, with the hardware that they are from."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "clusterddp", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, rows in tables.items():
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.32 * len(rows)), layout="constrained")
        shown = list(reversed(rows))
        spread = [
            [row.ratio - min(row.ratios) for row in shown],
            [max(row.ratios) - row.ratio for row in shown],
        ]
        labels = [f"{row.name} / {row.baseline} ({row.unit})" for row in shown]
        axes.barh(labels, [row.ratio for row in shown], xerr=spread, color="#4878a8", capsize=2)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(f"ratio, median of the pairs; least to greatest\n{hardware}")
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        made.append(path)
    return made
