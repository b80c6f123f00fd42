"""Draw loss.png from the loss.csv that train.py writes; it can be redrawn without training.

python -m tools.demo_model.plot_loss backends/demo_checkpoint
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path, help="folder with loss.csv; loss.png goes there too")
    folder: Path = parser.parse_args().folder
    with (folder / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for column, style in (
        ("training_loss", {"linewidth": 1}),
        ("validation_loss", {"marker": "o"}),
    ):
        measured = [row for row in rows if row[column]]
        tokens_millions = [int(row["tokens"]) / 1e6 for row in measured]
        losses = [float(row[column]) for row in measured]
        axes.plot(tokens_millions, losses, label=column.replace("_", " "), **style)
    axes.set_xlabel("tokens seen, millions")
    axes.set_ylabel("nats per token")
    axes.set_ylim(top=6)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=100)


if __name__ == "__main__":
    main()
