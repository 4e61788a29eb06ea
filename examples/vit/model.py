"""A plain serial Vision Transformer (Dosovitskiy et al., 2021): torch alone, nothing of Axo in it."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Every patch attends to every patch: (images, patches, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images, patches, width = x.shape
        qkv = self.qkv(x).view(images, patches, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v)
        return self.proj(found.transpose(1, 2).reshape(images, patches, width))


class Block(nn.Module):
    """Attention and an MLP, each on normalised activations and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ViT(nn.Module):
    """Classify images: (images, size, size) -> (images, classes).

    Args:
        size: Pixels of a side.
        patch: Pixels of a patch's side.
        classes: What an image may be.
        width, depth, heads: Of the transformer.
    """

    def __init__(
        self, size: int = 8, patch: int = 4, classes: int = 10, width: int = 64, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.embed(patches.flatten(3).flatten(1, 2)) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))
