"""A plain serial U-Net (Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", 2021): torch alone.

Levels of residual blocks, each level at half the height and width of the one before, down and up again; what each block
on the way down leaves joins a block on the way up. Attention at the sizes that ``attention`` lists. Each residual block
learns of the time step through a linear layer. Products by 1 x 1 are convolutions too, so that all of them are of two
kinds: ``nn.Conv2d`` and ``nn.Linear``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Two convolutions, the time step between them, around them a sum: (N, into, H, W) -> (N, out, H, W)."""

    def __init__(self, into: int, out: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(groups, into), nn.GroupNorm(groups, out)
        self.conv_1, self.conv_2 = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()
        nn.init.zeros_(self.conv_2.weight)  # a block begins as its skip connection
        nn.init.zeros_(self.conv_2.bias)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_1(F.silu(self.norm_1(x)))
        hidden = hidden + self.time(F.silu(time)).unflatten(-1, (-1, 1, 1))
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(hidden)))


class Attention(nn.Module):
    """Every pixel attends to every pixel: (N, C, H, W) -> the same."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(images, self.heads, 3, channels // self.heads, height * width)
        q, k, v = qkv.permute(2, 0, 1, 4, 3)  # (N, heads, pixels, channels of a head) each
        found = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(found.transpose(2, 3).reshape(x.shape))


class Level(nn.Module):
    """One step of the way: a residual block, attention at some sizes."""

    def __init__(self, block: Residual, attention: Attention | None) -> None:
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.block(x, time)
        return x if self.attention is None else self.attention(x)


class UNet(nn.Module):
    """Tell the noise in images: (N, images, size, size) and time steps (N,) -> (N, images, size, size).

    Args:
        images: Channels of an image.
        size: Height and width of an image; half of it at each further level.
        channels: Of the first level.
        multiples: Channels of each level, in these.
        blocks: Residual blocks of a level on the way down; one more on the way up.
        attention: The sizes at which blocks are followed by attention.
        heads: Of attention.
        groups: Of each group norm.
    """

    def __init__(
        self,
        images: int = 3,
        size: int = 32,
        channels: int = 256,
        multiples: tuple[int, ...] = (1, 2, 2, 2),
        blocks: int = 3,
        attention: tuple[int, ...] = (16, 8),
        heads: int = 4,
        groups: int = 32,
    ) -> None:
        super().__init__()
        time = 4 * channels
        self.channels = channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(images, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()

        def level(into: int, out: int) -> Level:
            return Level(
                Residual(into, out, time, groups), Attention(out, heads, groups) if size in attention else None
            )

        width, widths = channels, [channels]
        for number, multiple in enumerate(multiples):
            for _ in range(blocks):
                self.down.append(level(width, multiple * channels))
                width = multiple * channels
                widths.append(width)
            if number < len(multiples) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                widths.append(width)
                size //= 2
        self.middle = nn.ModuleList(
            [
                Level(Residual(width, width, time, groups), Attention(width, heads, groups)),
                Level(Residual(width, width, time, groups), None),
            ]
        )
        for number, multiple in reversed(list(enumerate(multiples))):
            for _ in range(blocks + 1):
                self.up.append(level(width + widths.pop(), multiple * channels))
                width = multiple * channels
            if number > 0:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)))
                size *= 2
        self.norm = nn.GroupNorm(groups, width)
        self.last = nn.Conv2d(width, images, 3, padding=1)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        time = self.time(waves(steps, self.channels))
        x = self.first(x)
        left = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, Level) else part(x)
            left.append(x)
        for part in self.middle:
            x = part(x, time)
        for part in self.up:
            x = part(torch.cat([x, left.pop()], 1), time) if isinstance(part, Level) else part(x)
        return self.last(F.silu(self.norm(x)))


def waves(steps: torch.Tensor, features: int) -> torch.Tensor:
    """Sines and cosines of the time step: (N,) -> (N, features)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(features // 2, device=steps.device) / (features // 2))
    angles = steps[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], -1)
