"""Parallel layers that stand in for those of ``torch.nn``: same names and arguments, this rank's shards inside.

What moves between ranks is in ``axo.matmul``; where a tensor lies is in ``axo.placement``.

    layer                            what all of them share
    linear, conv, embedding, norm, group_norm, dropout, goldfish    the layers
    loss, linear_loss                of logits, and of a head whose logits never exist whole
    context, context_attention       of sequences whose tokens lie on several ranks
    experts                          of mixtures that lie on several ranks
    replicated, placeholder          modules that stay serial, and those that another pipeline stage has
    init, generator, randomness      first values and random numbers that agree between ranks
    chain, shared_input, sequence    whether layers fit each other, share an input, or split tokens over x
    torch_utils, quantize, shard_reads    on the parameters of a model: torch's utilities, few bits, who reads them
"""

from axo.nn import goldfish
from axo.nn.context_attention import attention
from axo.nn.conv import Conv2d
from axo.nn.dropout import Dropout
from axo.nn.embedding import Embedding
from axo.nn.group_norm import GroupNorm
from axo.nn.init import init_weights
from axo.nn.linear import Features, Linear
from axo.nn.linear_loss import linear_cross_entropy
from axo.nn.loss import CrossEntropyLoss, cross_entropy
from axo.nn.norm import LayerNorm, RMSNorm
from axo.nn.shared_input import share_input
from axo.optim.clip import clip_grad_norm_

__all__ = [
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Features",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "attention",
    "clip_grad_norm_",
    "cross_entropy",
    "goldfish",
    "init_weights",
    "linear_cross_entropy",
    "share_input",
]
