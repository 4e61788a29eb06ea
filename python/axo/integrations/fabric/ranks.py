"""The ranks of a grid as Fabric sees them: who is here, how they are started, and the collectives of a user's program.

``counts="data"``: a data rank, its Gx*Gy ranks together, is what Fabric calls a device; whatever reduces or gathers for
the user then counts each data rank once, while agreements and barriers are of all ranks.

Not here: the model, the optimizer, the data and the checkpoints (lightning.py).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

import axo
from axo.comm.rendezvous import may_be_repeated, store_of_this_start
from axo.grid import Grid
from axo.integrations.fabric.fp16 import agree_on_overflow

COUNTS = ("ranks", "data")


class GridRanks(ParallelStrategy):
    """What a strategy on a grid is before it knows a model.

    Args:
        grid: Ranks on each axis; None: the environment's AXO_GRID.
        counts: What ``fabric.world_size``, ``all_reduce`` and ``all_gather`` count: ``"ranks"``, or ``"data"`` ranks.
        timeout: Of the rendezvous and of each operation.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: As in Fabric's own strategies.

    Raises:
        ValueError: No grid is given, or an option is not known.
    """

    def __init__(
        self,
        grid: Grid | str | None,
        counts: str,
        timeout: timedelta,
        accelerator: Any,
        parallel_devices: list[torch.device] | None,
        cluster_environment: Any,
        checkpoint_io: Any,
        precision: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        if counts not in COUNTS:
            raise ValueError(f"AxoStrategy: counts={counts!r} is not known; use one of {COUNTS}")
        self.grid = _grid(grid)
        self.counts = counts
        self.comms: Any = None
        self._timeout = timeout
        self._num_nodes = 1

    # --- who is here --------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        # Who counts data ranks cannot say on how many hosts they are: one of them may be on several.
        slurm = self.counts == "data" and SLURMEnvironment.detect()
        self._num_nodes = int(os.environ.get("SLURM_NNODES", num_nodes)) if slurm else num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return self.grid.world_size // self._num_nodes

    @property
    def data_ranks(self) -> int:
        """Ranks that see different batches: Gz * Gdata."""
        return self.grid.z * self.grid.data

    @property
    def world_size(self) -> int:
        return self.data_ranks if self.counts == "data" else self.grid.world_size

    @property
    def distributed_sampler_kwargs(self) -> Any:
        coords = self.grid.coords(self.global_rank)
        return {"num_replicas": self.data_ranks, "rank": coords.z + self.grid.z * coords.data}

    def _set_world_ranks(self) -> None:
        """Called by Fabric once it knows devices, nodes and environment, before any process is started."""
        self._spread_devices()
        environment = self.cluster_environment
        if environment is None:
            return
        environment.set_world_size(self.grid.world_size)
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        if environment.world_size() != self.grid.world_size:
            raise ValueError(
                f"AxoStrategy: grid {self.grid} has {self.grid.world_size} ranks, but {environment.world_size()} were"
                f" started; start {self.grid.world_size}, or use another grid"
            )
        decorators: tuple[Any, ...] = (rank_zero_only, utilities_rank_zero_only)
        for decorator in decorators:
            decorator.rank = self.global_rank

    def _spread_devices(self) -> None:
        if self.grid.world_size % self._num_nodes:
            raise ValueError(
                f"AxoStrategy: grid {self.grid} has {self.grid.world_size} ranks, which do not divide over"
                f" num_nodes={self._num_nodes}"
            )
        given, wanted = self.parallel_devices or [torch.device("cpu")], self.num_processes
        fitting = {1, wanted} | ({self.data_ranks} if self.counts == "data" else set())
        if len(given) not in fitting:
            raise ValueError(
                f"AxoStrategy: devices={len(given)} does not fit grid {self.grid}; leave devices out (the grid says how"
                f" many ranks there are), or use devices={wanted}"
            )
        if len(given) < wanted:
            kind = given[0].type
            given = [torch.device(kind) if kind == "cpu" else torch.device(kind, index) for index in range(wanted)]
        self.parallel_devices = given

    # --- launch -------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self._num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.comms is not None:
            return
        environment = self.cluster_environment
        assert environment is not None
        # The ranks are the environment's: self.world_size may count something else.
        rank, ranks = environment.global_rank(), environment.world_size()
        options: dict[str, Any] = {"timeout": self._timeout}
        if may_be_repeated() and not torch.distributed.is_initialized():
            store = next(iter(torch.distributed.rendezvous("env://", timeout=self._timeout)))[0]
            options["store"] = store_of_this_start(store, rank, ranks, self._timeout.total_seconds())
        _init_dist_connection(environment, "axo", rank, ranks, **options)
        self.comms = axo.connect(self.grid, device=self.root_device, timeout=self._timeout)
        agree_on_overflow(self.precision, self.comms)

    def teardown(self) -> None:
        if self.comms is not None:
            self.comms.close()
        super().teardown()

    # --- collectives of the user ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce in place over ranks (or data ranks: see ``counts``); a given group of torch's is torch's business."""
        if not isinstance(tensor, torch.Tensor) or self.comms is None:
            return tensor
        if group not in (None, torch.distributed.group.WORLD):
            from lightning.fabric.utilities.distributed import _sync_ddp

            return _sync_ddp(tensor, group, reduce_op)
        op = "mean" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        mean = op in ("mean", "avg")
        lines = (self.comms.z, self.comms.data) if self.counts == "data" else (self.comms.world,)
        result = tensor.reshape(-1).clone()
        for line in lines:
            line.all_reduce(result, "sum" if mean else op)
        tensor.copy_((result / self.world_size if mean else result).view_as(tensor))
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        gathered = super().all_gather(tensor, group, sync_grads)
        if self.counts == "data" and group in (None, torch.distributed.group.WORLD) and self.comms is not None:
            first = [rank for rank in range(self.grid.world_size) if self.grid.coords(rank)[:2] == (0, 0)]
            gathered = gathered[first]
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over all ranks of the grid, whatever ``counts`` says: peers must decide alike."""
        if self.comms is None:
            return decision
        vote = torch.tensor([int(decision)], dtype=torch.int64, device=self.comms.device)
        return bool(self.comms.world.all_reduce(vote, "min" if all else "max").item())

    def barrier(self, name: str | None = None) -> None:
        if self.comms is not None:
            self.comms.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.comms is None:
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src)
        return box[0]

    def _check_launched(self, what: str) -> None:
        if self.comms is None:
            raise RuntimeError(f"AxoStrategy: fabric.{what}() came before fabric.launch(); launch first")


def _grid(grid: Grid | str | None) -> Grid:
    if grid is None:
        grid = os.environ.get("AXO_GRID")
        if not grid:
            raise ValueError("AxoStrategy: no grid; pass grid='2x2x2x1', or set AXO_GRID")
    return Grid.parse(grid) if isinstance(grid, str) else grid
