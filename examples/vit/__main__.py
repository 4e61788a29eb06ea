"""``python -m examples.vit``: train a ViT in four settings, compare, draw."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from axo.launch import RankFailed, launch_local
from examples.vit import figure
from examples.vit.training import SETTINGS, Epoch, Options, train

LEAST = 0.95  # accuracy on test images, in each setting and seed
NOISE = 1e-4  # by how much the mean loss of an epoch may differ: fp32 sums in another order, amplified by training
BORDER = 0.01  # and the accuracies: an image on the border of two digits may change sides


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if every target is met."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m examples.vit", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting (3)")
    parser.add_argument(
        "--epochs", type=int, default=defaults.epochs, help=f"passes over the images ({defaults.epochs})"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/vit"), help="folder of vit.jsonl and vit.png (runs/vit)")
    options = parser.parse_args(arguments)
    made = Options(epochs=options.epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "vit.jsonl"
    known = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    runs: dict[str, list[list[Epoch]]] = {setting.name: [] for setting in SETTINGS}
    print(f"{'setting':24} {'seed':>4} {'loss':>8} {'train':>7} {'test':>7} {'seconds':>8}")
    for seed in range(options.seeds):
        for setting in SETTINGS:
            what = asdict(setting) | {"seed": seed, "options": asdict(made)}
            row = next((row for row in known if all(row[key] == value for key, value in what.items())), None)
            if row is None:
                began = time.perf_counter()
                history = launch_local(train, setting.ranks, setting, seed, made)
                row = what | {"seconds": time.perf_counter() - began, "epochs": [asdict(epoch) for epoch in history]}
                with path.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(row) + "\n")
            runs[setting.name].append([Epoch(**epoch) for epoch in row["epochs"]])
            last = runs[setting.name][-1][-1]
            print(
                f"{setting.name:24} {seed:4} {last.loss:8.4f} {last.train_accuracy:7.1%} {last.test_accuracy:7.1%}"
                f" {row['seconds']:8.1f}",
                flush=True,
            )
    subtitle = f"{made.depth} blocks of width {made.width}, hand-written digits, mean of {options.seeds} seeds"
    figure.draw(options.out / "vit.png", runs, subtitle=subtitle)
    return judge(runs)


def judge(runs: dict[str, list[list[Epoch]]]) -> int:
    """Print what became of the targets; 1 when one is missed."""
    serial, *others = runs.values()
    pairs = [(one, two) for seeds in others for one, two in zip(serial, seeds, strict=True)]
    epochs = [both for one, two in pairs for both in zip(one, two, strict=True)]
    loss = max(abs(one.loss - two.loss) for one, two in epochs)
    worst = max(abs(one.test_accuracy - two.test_accuracy) for one, two in epochs)
    least = min(history[-1].test_accuracy for seeds in runs.values() for history in seeds)
    targets = {
        f"mean loss of an epoch: at most {loss:.1e} from one rank's ({NOISE:g} allowed)": loss <= NOISE,
        f"test accuracy of an epoch: at most {worst:.1%} from one rank's ({BORDER:.0%} allowed)": worst <= BORDER,
        f"test accuracy: at least {least:.1%} in each setting and seed (above {LEAST:.0%} wanted)": least > LEAST,
    }
    for target, met in targets.items():
        print(f"{'met   ' if met else 'MISSED'}  {target}")
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, RankFailed) as error:
        raise SystemExit(f"error: {error}") from None
