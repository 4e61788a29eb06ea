"""One run: images, noise added to them, and a U-Net that learns to tell it (Nichol and Dhariwal, 2021).

What a grid changes is between the lines of ``train``: the model is parallelized, and each rank takes its rows of a
batch. The loss is the mean square error of the noise, over a cosine schedule of 1,000 steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import axo
from examples.unet.model import UNet
from examples.unet.transfers import Product, products
from examples.vit.training import digits

STEPS = 1000  # of noise, from none to nothing else


@dataclass(frozen=True)
class Options:
    """Of a run: the same on one rank and on a grid.

    Attributes:
        model: Arguments of ``UNet``, by name.
        steps: Of the optimizer.
        batch: Images of all ranks together.
        lr: Of SGD with momentum 0.9. (Adam makes steps of size lr out of rounding where the true gradient is zero.)
    """

    model: dict[str, object]
    steps: int = 40
    batch: int = 16
    lr: float = 0.02


@dataclass
class Run:
    """What a run gave.

    Attributes:
        losses: Mean over all rows, of each step.
        weights: Whole, under the serial names.
        counts: (operation, axis) -> elements that this rank put into collectives in the first step.
        vectors: Elements of this rank's biases and norm weights, of the whole model.
        products: The products that a grid splits, with what each has become.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    counts: dict[tuple[str, str], int]
    vectors: int
    products: list[Product]


def train(grid: str, options: Options) -> Run:
    """Train a U-Net on the digits of examples/vit; called on every rank. ``grid`` is "" for one rank without Axo."""
    images = digits()[0].unsqueeze(1)
    torch.manual_seed(0)
    model = UNet(**options.model)  # type: ignore[arg-type]
    layers = products(model, images) if grid else []
    comms = axo.connect(grid) if grid else None
    if comms is not None:
        model = axo.parallelize(model, comms, plan="auto")
        kinds = {line.name: line.kind for line in axo.plan_report(model)}
        layers = [replace(layer, kind=kinds[layer.name]) for layer in layers if kinds[layer.name] != "replicate"]
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    losses, counts = [], {}
    for step in range(options.steps):
        rows = torch.randint(len(images), (options.batch,), generator=draw)
        times = torch.randint(STEPS, (options.batch,), generator=draw)
        noise = torch.randn(options.batch, *images.shape[1:], generator=draw)
        if comms is not None:
            rows, times, noise = (axo.shard_batch(part, comms) for part in (rows, times, noise))
        keep = torch.cos((times + 0.5) / STEPS * torch.pi / 2).view(-1, 1, 1, 1)
        with axo.count_collectives() as seen:
            loss = F.mse_loss(model(keep * images[rows] + (1 - keep**2).sqrt() * noise, times), noise)
            optimizer.zero_grad()
            loss.backward()
        if step == 0:
            counts = {key: count.elements for key, count in seen.items()}
        optimizer.step()
        losses.append(loss.item())
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if comms is not None:
        mean = torch.tensor(losses, dtype=torch.float64)
        losses = (comms.world.all_reduce(mean) / comms.grid.world_size).tolist()
        comms.close()
    return Run(losses, weights, counts, vectors, layers)
