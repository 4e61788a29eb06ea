"""Forward passes of a model that cannot be right, refused before anything is issued.

A model made by a plan takes the same input on all ranks along x and y (with Tesseract, y). Rows that differ there would
be mixed in silence, so inputs are compared, in the first pass with gradients and the first one without, or
(``AXO_CHECK=1``) in all.

A compiled model is refused unless ``keep_out_of_graphs`` was called: to trace its communication takes minutes a layer.
So is one inside of torch's DistributedDataParallel, which broadcasts rank 0's parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.parallel import DistributedDataParallel

from axo.comm.connect import Communicators
from axo.comm.counting import observers as counting
from axo.errors import Refused


def refuse_wrapped(parameters: Callable[[], Iterable[torch.nn.Parameter]]) -> None:
    """Refuse a forward pass that a compiler traces, or calls between two graphs, and one of DistributedDataParallel.

    One that only calls the model, without its ``parameters`` (a frozen teacher), is right.

    Raises:
        Refused: It is one. Who has called ``keep_out_of_graphs`` runs without a compiler here.
    """
    around = DistributedDataParallel._get_active_ddp_module()
    if around is not None and not {id(p) for p in around.parameters()}.isdisjoint(map(id, parameters())):
        raise Refused(
            "DistributedDataParallel: it broadcasts rank 0's parameters and reduces gradients a second time; make the"
            " model anew and train what axo.parallelize returns as it is; Axo reduces gradients over z and data itself"
        )
    if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
        raise Refused(
            "torch.compile: it would trace this model's communication; call"
            " axo.integrations.fabric.compile.keep_out_of_graphs(model) before torch.compile(model), and"
            " again where the model was attached since"
        )


def check_same_inputs(comms: Communicators, tensors: Iterable[torch.Tensor]) -> None:
    """Compare a model's inputs over the axes that do not split rows.

    Raises:
        ValueError: They differ; on every rank of the axis.
    """
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_meta:
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    mine = torch.tensor([int.from_bytes(digest.digest(), "little")], dtype=torch.int64, device=comms.device)
    axes = [axis for axis in ("x", "y") if axis not in comms.arrangement.rows]
    for axis in axes:
        if comms.grid.size(axis) == 1:
            continue
        with counting.paused():
            digests = comms.axis(axis).all_gather(mine).tolist()
        differ = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if differ:
            raise ValueError(
                f"forward: the input on {axis}={', '.join(map(str, differ))} differs from that on {axis}=0; ranks along"
                f" {' and '.join(axes)} work on the same rows (only {' and '.join(reversed(comms.arrangement.rows))}"
                " split the batch): give the sampler comms.row_part of comms.row_parts, or cut a batch by"
                " axo.shard_batch(batch, comms)"
            )
