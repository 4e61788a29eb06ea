"""connect: from a grid to one communicator for each axis.

    comms = axo.connect("2x2x2x1")                  # under torchrun, or after torch.distributed.init_process_group
    comms = axo.connect("2x2x2x1", device="cuda")   # the same over NCCL or RCCL, on the GPU that LOCAL_RANK names
    comms.x, comms.y, comms.z, comms.data, comms.world
    comms = axo.connect("2x2x2x1", pipeline=4)      # 4 stages of 8 ranks each: comms.pipeline, comms.stage
    comms = axo.connect("2x1x1x1", group=group)     # a grid on the ranks of a process group
    comms = axo.connect("2x1x4x1", context=2)       # 2 neighbours along z hold pieces of the same sequences
    comms = axo.connect("2x1x4x2", experts=8)       # all 8 data ranks hold other experts; 4: those along z

The ranks meet through torch.distributed's store; the collectives run in Axo's own core. One communicator spans all
ranks; each axis with more than one rank is split from it. ``axo.comm.transports`` chooses what moves the bytes.

Pipeline stages are outermost. The number of a rank among all is: its rank in the stage's grid + stage * the ranks of a
grid. With stages, ``rank``, ``coords``, ``world`` and the four axes are those of one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from types import SimpleNamespace, TracebackType
from typing import Protocol

import torch
import torch.distributed as dist

from axo.arrangement import AXONN, Arrangement
from axo.comm.c10d import BackendOptions, register
from axo.comm.communicator import Communicator, tell_of
from axo.comm.device import DeviceOptions
from axo.comm.device_choice import resolve_device
from axo.comm.extension import _C
from axo.comm.flight import arm
from axo.comm.rendezvous import Meeting, TimeLeft, launchers_store, store_of_this_start
from axo.comm.transports import alone, meet
from axo.errors import Refused
from axo.grid import AXES, Coords, Grid, Holders, check_experts, check_ranks, checked_axis
from axo.launch import Rank, keep_freed_memory
from axo.settings import check as check_settings

_DEFAULT_TIMEOUT_S = 600.0
_MEETING_TIMEOUT_S = 60.0
_LONGEST_S = 1e9
_MEETING = "axo/connect"  # where the ranks meet in the store
register()  # torch need not look for the entry point, which an Axo that is on the path alone has not


class Attached(Protocol):
    """What an upper part keeps with the communicators of a grid."""

    def poll(self) -> None:
        """Raise what has failed since the last look. Waits for nothing."""


class Communicators:
    """The communicators of one grid. Layers hold this object; there is no global one.

    Attributes:
        grid: The grid; of one stage, where there are several. rank, coords: Where this process stands in it.
        device: What the communicators move.
        x, y, z, data: A :class:`Communicator` each; one of a single rank issues nothing.
        world: Among all ranks of the grid.
        context: Among the neighbours along z that hold pieces of the same sequences; counted as z's.
        experts: Among the neighbours along z (and, where they are all of those, data) that hold other experts each;
            counted as z's, or data's.
        expert_lines: "z/experts", "data/experts": among the ranks along z, or data, that hold the same experts.
        stages, stage: How many grids follow one another in a pipeline, and which is this rank's.
        pipeline: Among the ranks that stand where this one does in the grids of all stages, by stage.
        everyone: Among the ranks of all stages.
        timeout: The time limit of each operation, in seconds.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        everyone: Communicator,
        owns_process_group: bool,
        timeout: float,
        *,
        stages: int = 1,
        group: dist.ProcessGroup | None = None,
        context: int = 1,
        experts: int = 1,
    ) -> None:
        self.grid = grid
        self.timeout = timeout
        self.stages = stages
        self.stage, self.rank = divmod(rank, grid.world_size)
        self.coords: Coords = grid.coords(self.rank)
        self.device = everyone.device
        self.everyone = everyone
        self._group = group
        self.world, self.pipeline = everyone, alone("pipeline", self.device)
        if stages > 1:
            self.world = self._part(everyone, self.stage, self.rank, grid.world_size, "world", "world")
            self.pipeline = self._part(everyone, self.rank, self.stage, stages, "pipeline", "pipeline")
        self.x, self.y, self.z, self.data = map(self._line, AXES)
        self.context = alone("context", self.device)
        if context > 1:  # not the z axis' own, though it may be of the same ranks: weights are on their way over that
            run, place = divmod(self.coords.z, context)
            self.context = self._part(self.z, run, place, context, "context", "z")
        self.experts, self.expert_lines = alone("experts", self.device), dict[str, Communicator]()
        if experts > 1:
            self._spread_experts(experts)
        self.introduce()
        self._arrangement: Arrangement | None = None
        self.attached: dict[str, Attached] = {}  # what upper parts keep as long as these live
        self._neighbours: dict[tuple[str, int], Communicator] = {}
        self._before_close: list[Callable[[], object]] = []
        self._owns_process_group = owns_process_group

    def __repr__(self) -> str:
        where = f"rank {self.rank} at {tuple(self.coords)}"
        stage = f"stage {self.stage} of {self.stages}, " if self.stages > 1 else ""
        return f"Communicators(grid {self.grid}, {stage}{where}, {self.everyone.transport})"

    def __enter__(self) -> Communicators:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif error is not None:
            # Not a process group's own communicator: the program may go on with that.
            mine = [line for line in self.communicators if self._owns_process_group or not line._borrowed]
            tell_of(error, [*self._neighbours.values(), *mine])

    def _split(self, of: Communicator, color: int, rank: int, size: int, name: str, axis: str) -> Communicator | None:
        """The communicator of the ``size`` ranks of one color, of which this is ``rank``; None: a negative color."""
        return of.split(color, rank, name=name, axis=axis)

    def _part(self, of: Communicator, color: int, rank: int, size: int, name: str, axis: str) -> Communicator:
        part = self._split(of, color, rank, size, name, axis)
        assert part is not None, "its color is not negative"
        return part

    def _line(self, axis: str) -> Communicator:
        size, rank = self.grid.size(axis), getattr(self.coords, axis)
        if size == 1:
            return alone(axis, self.device)
        return self._part(self.world, self.grid.ranks(axis, self.rank)[0], rank, size, axis, axis)

    def _spread_experts(self, count: int) -> None:
        grid, coords, axis = self.grid, self.coords, "z" if count <= self.grid.z else "data"
        holders = self.expert_holders(0, count)
        run, place = divmod(coords.z + grid.z * coords.data, count)
        color = coords.x + grid.x * (coords.y + grid.y * run)
        self.experts = self._part(self.world, color, place, count, "experts", axis)
        for axis, line in (("z", self.z), ("data", self.data)):
            if holders.run(axis) > 1:
                run, place = divmod(getattr(coords, axis), holders.run(axis))
                size = line.size // holders.run(axis)
                self.expert_lines[f"{axis}/experts"] = self._part(line, place, run, size, f"{axis}/experts", axis)

    def expert_holders(self, place: int, ranks: int | None = None) -> Holders:
        """Where the experts lie that the ``place``-th rank of ``experts`` (or so many) holds."""
        ranks = ranks or self.experts.size
        return Holders(place, min(ranks, self.grid.z), max(1, ranks // self.grid.z))

    def among(self, stages: list[int], name: str) -> Communicator | None:
        """A communicator of the ranks of ``pipeline`` that have these stages; None on others. Collective over all."""
        mine = self.stage in stages
        rank = sorted(stages).index(self.stage) if mine else 0
        return self._split(self.pipeline, 0 if mine else -1, rank, len(stages), name, "pipeline")

    def introduce(self) -> None:
        """Let each communicator know the others of this grid."""
        for line in self.communicators:
            line._siblings = tuple(other for other in self.communicators if other is not line)

    def on(self, grid: Grid) -> Communicators:
        """The same ranks on another grid, without stages; ``world`` is that of this one. Collective.

        Raises:
            ValueError: The grid is of another number of ranks.
        """
        check_ranks("regrid", grid, 1, self.everyone.size)
        return Communicators(grid, self.everyone.rank, self.everyone, False, self.timeout, group=self._group)

    def become(self, other: Communicators) -> None:
        """Be ``other``, which is of the same ranks, to all that hold this object; its own axes are closed."""
        self.close_axes()
        names = ("checkpoint_group", "_before_close", "_owns_process_group")  # what is of the ranks, not of their grid
        of_ranks = {name: value for name, value in vars(self).items() if name in names}
        vars(self).clear()
        vars(self).update(vars(other) | of_ranks)

    def close_axes(self) -> None:
        """Close the communicators of this grid alone: all but ``world``."""
        for line in (*self._neighbours.values(), *self.communicators):
            if line not in (self.world, self.pipeline, self.everyone):
                line.close()

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Those of x, y, z, data and the world, of a context and of experts; with several stages those of the pipeline
        and of everyone too."""
        inner = [line for line in (self.context, self.experts, *self.expert_lines.values()) if line.size > 1]
        of_grid = (self.x, self.y, self.z, self.data, self.world, *inner)
        return of_grid if self.stages == 1 else (*of_grid, self.pipeline, self.everyone)

    def axis(self, name: str) -> Communicator:
        """The communicator of axis ``name``.

        Raises:
            ValueError: Not one of x, y, z, data.
        """
        return getattr(self, name if name in AXES else checked_axis(name))

    def neighbours(self, axis: str, count: int) -> Communicator:
        """The communicator of this rank's run of ``count`` neighbours along ``axis``: ranks 0 to count-1, and so on.

        Made on first use, which is collective over the axis; counted under the axis's name.

        Raises:
            ValueError: ``count`` does not divide the axis.
        """
        size = self.grid.size(axis)
        if count < 1 or size % count:
            raise ValueError(f"neighbours: {count} ranks do not divide {axis}={size}")
        if count == size:
            return self.axis(axis)
        if (axis, count) not in self._neighbours:
            run, rank = divmod(getattr(self.coords, axis), count)
            line = self._part(self.axis(axis), run, rank, count, f"{axis}/{count}", axis)
            line._siblings = self.communicators
            self._neighbours[axis, count] = line
        return self._neighbours[axis, count]

    @property
    def arrangement(self) -> Arrangement:
        """Where rows, features and weights lie: axonn's, unless ``axo.parallelize`` was the first to ask for another.

        Whoever asks (a layer, a batch that is cut) settles it, so that data and layers cannot disagree.
        """
        if self._arrangement is None:
            self._arrangement = AXONN
        return self._arrangement

    def arrange(self, arrangement: Arrangement) -> None:
        """Settle on an arrangement for all layers and batches of these communicators.

        Raises:
            ValueError: The grid does not fit, or layers or batches have another.
        """
        arrangement.check(self.grid)
        if self.context.size > 1:
            arrangement.only_axonn(f"context={self.context.size}")
        if self.experts.size > 1:
            arrangement.only_axonn(f"experts={self.experts.size}")
        if self._arrangement not in (None, arrangement):
            raise ValueError(
                f"algorithm={arrangement.name!r}: layers or batches of these communicators are arranged for"
                f" {self.arrangement.name!r} already; call axo.connect again for a model of another algorithm"
            )
        self._arrangement = arrangement

    @property
    def data_ranks(self) -> int:
        """Ranks that work on rows of their own: over z and data, with Tesseract over x too."""
        return self.arrangement.row_parts(self.grid)

    @property
    def data_rank(self) -> int:
        """Which part of the rows this rank works on, of ``data_ranks``."""
        return self.arrangement.row_part(self.grid, self.coords)

    @property
    def row_parts(self) -> int:
        """Parts that the rows of a batch are cut into: one for all the data ranks of a context, which share rows."""
        return self.data_ranks // self.context.size

    @property
    def row_part(self) -> int:
        """Which of these parts this rank works on."""
        return self.data_rank // self.context.size

    def poll(self) -> None:
        """Raise what a kernel of a fused product has reported (``axo_kernels.SignalTimeout``). Waits for nothing."""
        for part in self.attached.values():
            part.poll()

    @property
    def blocked_seconds(self) -> dict[str, float]:
        """Seconds that this rank has been blocked in communication since the start, by axis (and "world")."""
        names = (*AXES, "world") if self.stages == 1 else (*AXES, "world", "pipeline", "everyone")
        seconds = {name: getattr(self, name).blocked_seconds for name in names}
        for line in self.communicators:
            if line.name not in seconds:
                seconds[line.axis] += line.blocked_seconds
        return seconds

    @property
    def ranks(self) -> list[int]:
        """The ranks of all stages as torch.distributed numbers them, in the order of their numbers here."""
        count = self.stages * self.grid.world_size
        return list(range(count)) if self._group is None else dist.get_process_group_ranks(self._group)

    @cached_property
    def device_mesh(self) -> dist.DeviceMesh:
        """A torch DeviceMesh of dims ("data", "z", "y", "x"). Its first use is collective, as it is made then.

        With several stages its first dim is "pipeline".
        """
        if not dist.is_initialized():  # one rank without torchrun
            dist.init_process_group(_backends(self.device), store=dist.HashStore(), rank=0, world_size=1)
        sizes = {axis: self.grid.size(axis) for axis in reversed(AXES)}
        if self.stages > 1:
            sizes = {"pipeline": self.stages, **sizes}
        names, ranks = tuple(sizes), torch.tensor(self.ranks).view(*sizes.values())
        if self._group is None:
            return dist.DeviceMesh(self.device.type, ranks, mesh_dim_names=names)
        # On a part of the world only its ranks make groups: of those that differ from this one in one dim.
        place = (ranks == dist.get_rank()).nonzero()[0].tolist()
        lines = [ranks[(*place[:dim], slice(None), *place[dim + 1 :])].tolist() for dim in range(len(names))]
        return dist.DeviceMesh.from_group(
            [self._small_group(line) for line in lines], self.device.type, mesh=ranks, mesh_dim_names=names
        )

    @cached_property
    def checkpoint_mesh(self) -> dist.DeviceMesh:
        """The ranks of this grid as a DeviceMesh of dims ("data", "y", "x", "z"), of the groups of ``device_mesh``.

        DTensor splits a dim from the left mesh dim to the right, so that plain shards over it describe weights: blocks
        over x and y, rows of a block over z.
        """
        names, mesh = ("data", "y", "x", "z"), self.device_mesh
        ranks = (mesh.mesh if self.stages == 1 else mesh.mesh[self.stage]).permute(0, 2, 3, 1).contiguous()
        groups = [mesh.get_group(name) for name in names]
        return dist.DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    @cached_property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks of ``pipeline`` as a process group, for the messages of ``torch.distributed.pipelining``.

        Its first use is collective over these ranks, as it is made then.
        """
        if not dist.is_initialized():
            return self.device_mesh.get_group("x")  # one rank without torchrun
        return self._small_group(self.ranks[self.rank :: self.grid.world_size])

    def _small_group(self, ranks: list[int]) -> dist.ProcessGroup:
        group = dist.new_group(ranks, timedelta(seconds=self.timeout), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # torch gives ranks that are not in it a number
        return group

    def before_close(self, callback: Callable[[], object]) -> None:
        """Have ``close``, and torch's ``destroy_process_group``, call this first: for what another thread does.

        Once, however often it is asked for.
        """
        if callback in self._before_close:
            return
        self._before_close.append(callback)
        asked_to_end = getattr(dist.distributed_c10d._world, "comms", None)  # private; where torch has none, by close
        if isinstance(asked_to_end, list):
            asked_to_end.append(SimpleNamespace(finalize=callback))

    @cached_property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """A process group of the ranks of all stages for CPU tensors, which nothing but checkpoints use.

        Its first use is collective, as it is made then.

        Raises:
            axo.PeerLost, axo.Timeout: A rank has died, or does not come within ``timeout``.
        """
        self.everyone.barrier()  # notices a death, which the store by which torch's groups are made does not
        serves_cpu = torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types
        part = self._group is not None
        group = dist.new_group(
            self.ranks if part else None,
            timedelta(seconds=self.timeout),
            None if serves_cpu else "gloo",
            # torch hands options on to NCCL too, which refuses them
            pg_options=None if "nccl" in dist.get_backend_config() else BackendOptions(self.timeout, "checkpoints"),
            use_local_synchronization=part,
        )
        assert isinstance(group, dist.ProcessGroup)
        return group

    def close(self) -> None:
        """Wait for this rank's pending operations and leave the peers. May be called again.

        Without it a communicator leaves when it is no longer referenced, or when the program ends.
        """
        while self._before_close:
            self._before_close.pop()()
        for communicator in (*self._neighbours.values(), *self.communicators):
            communicator.close()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_process_group = False


def connect(
    grid: Grid | str,
    device: str | torch.device = "cpu",
    *,
    timeout: float | timedelta = _DEFAULT_TIMEOUT_S,
    meeting_timeout: float | timedelta = _MEETING_TIMEOUT_S,
    device_options: DeviceOptions | None = None,
    pipeline: int = 1,
    context: int = 1,
    experts: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Communicators:
    """Make the communicators of ``grid``. Collective over all ranks of the world, or of ``group``.

    If torch.distributed is initialised, its store brings the ranks together. If not, under torchrun,
    ``init_process_group("axo")`` is called here (and undone by ``close``). A grid of one rank needs neither. On a CPU
    this process's malloc then keeps more of what is freed (``axo.launch.keep_freed_memory``), unless variables such as
    MALLOC_TRIM_THRESHOLD_ say otherwise.

    Args:
        grid: A grid of as many ranks as the world has, or its text, such as ``"2x2x2x1"``; of one stage, where
            ``pipeline`` asks for several.
        device: What to move: ``"cpu"``, or ``"cuda"`` for NVIDIA's and AMD's GPUs. Without an index it is the GPU that
            LOCAL_RANK names; it becomes torch's current device.
        timeout: The time limit of each operation, in seconds.
        meeting_timeout: How long this call waits for other ranks, in all that it does, in seconds; at most ``timeout``.
        device_options: How the communicators of GPUs are made: thread blocks, priorities, timing, checks.
        pipeline: Stages: the world then has ``pipeline`` times the ranks of the grid, stage after stage.
        context: How many neighbours along z hold pieces of the same sequences, which is for models that
            ``axo.parallelize`` makes, or that call :func:`axo.nn.attention`; it divides z.
        experts: Over how many neighbours along z the experts of a mixture are spread, each of which holds its part of
            them whole, but for what x and y cut. It divides z, or is a multiple of z that divides z * data.
        group: Ranks of torch.distributed that make up the world here, each of which calls this; the others do not.
            Default: all.

    Raises:
        ValueError: On every rank, when the grid does not fit the world or the ranks disagree on it; or a bad time, or
            an environment variable of Axo's that says what is not known (``axo.settings``), or this rank is not of
            ``group``.
        axo.Timeout: A rank did not come; names it. axo.PeerLost: One died or raised meanwhile; names it, and its error.
    """
    launched = None if dist.is_initialized() else Rank.from_environment()
    alone_here = launched is None and not dist.is_initialized()
    if group is not None and not dist.is_initialized():
        raise ValueError("connect: group= is of torch.distributed, which is not initialised; leave it out")
    wrong: Exception | None = None
    try:
        seconds, meeting = _in_seconds("timeout", timeout), _in_seconds("meeting_timeout", meeting_timeout)
        place, own_grid, own_stages = _checked(grid, device, device_options, pipeline, context, experts)
    except Exception as error:
        if alone_here:
            raise
        wrong, seconds, meeting = error, _DEFAULT_TIMEOUT_S, _MEETING_TIMEOUT_S
    if alone_here:
        return _connect_alone(own_grid, place, own_stages)
    limit = min(seconds, meeting)
    left = TimeLeft(limit)
    if launched is not None:
        rank, world_size = launched.rank, launched.world_size
        store = launchers_store(rank, world_size, limit)
    else:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = dist.distributed_c10d._get_default_store()
    if rank < 0:
        raise ValueError(f"connect: rank {dist.get_rank()} is not of the group given; only its ranks call connect")
    if group is not None:
        store = dist.PrefixStore(f"axo/part/{'-'.join(map(str, dist.get_process_group_ranks(group)))}", store)
    store = store_of_this_start(store, rank, world_size, left())
    ranks = Meeting(store, _MEETING, rank, world_size, f"connect (rank {rank} of {world_size})", left)
    if wrong is not None:
        ranks.give_up(wrong)
        raise wrong
    # Every rank learns every rank's grid first, so that all of them raise the same error.
    asked = ranks.gather(f"{own_grid} {own_stages} {context} {experts}", " (meeting_timeout=... waits longer)")
    grid, stages = _same_grid(asked)
    if launched is not None:
        dist.init_process_group(
            _backends(place),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=seconds),
            pg_options=BackendOptions(left()),
        )
    everyone = alone("world", place) if world_size == 1 else _world_of_process_group(place, seconds, group)
    if everyone is None:
        store = dist.PrefixStore(f"axo/world/{store.add(f'axo/worlds/{rank}', 1)}", store)
        options = device_options or DeviceOptions()
        everyone = meet(store, "connect", rank, world_size, place, seconds, options, meeting=left())
    before = everyone.limit_core(left())
    try:
        owns = launched is not None
        comms = Communicators(
            grid, rank, everyone, owns, seconds, stages=stages, group=group, context=context, experts=experts
        )
    except Exception as error:
        tell_of(error, [everyone])  # peers wait for this rank, there or in an axis
        raise
    for line in (comms.pipeline, *comms.communicators):
        line.set_timeout(seconds)
    everyone.limit_core(before)
    return comms


def check_comms(what: str, comms: object) -> None:
    """Check that ``comms`` are communicators of a grid.

    Raises:
        ValueError: They are not; ``what`` was given them.
    """
    if not hasattr(comms, "grid"):
        raise ValueError(f"{what}: comms={comms!r} is not what axo.connect returns; pass axo.connect('2x2x1x1'), or so")


def _checked(
    grid: Grid | str,
    device: str | torch.device,
    options: DeviceOptions | None,
    pipeline: int,
    context: int,
    experts: int,
) -> tuple[torch.device, Grid, int]:
    """What this rank asks for: device, grid and stages; and its process is set up for it."""
    place = resolve_device(device)
    if options is not None and place.type == "cpu":
        raise ValueError("connect: device_options are for GPUs; leave them out with device='cpu'")
    check_settings()
    arm()
    if not isinstance(grid, Grid | str):
        raise ValueError(f"connect: grid={grid!r} is not a grid; pass a text such as '2x2x2x1', or an axo.Grid")
    if isinstance(pipeline, bool) or not isinstance(pipeline, int) or pipeline < 1:
        raise ValueError(f"connect: pipeline={pipeline!r} is not a number of stages; use a whole number of at least 1")
    parsed = Grid.parse(grid)
    if isinstance(context, bool) or not isinstance(context, int) or context < 1 or parsed.z % context:
        fitting = ", ".join(str(count) for count in range(1, parsed.z + 1) if parsed.z % count == 0)
        raise ValueError(
            f"connect: context={context!r} ranks that share sequences do not divide z={parsed.z} of grid {parsed}; use"
            f" one of {fitting}"
        )
    check_experts("connect", parsed, experts)
    if experts > 1 and (context > 1 or pipeline > 1):
        other = f"context={context}" if context > 1 else f"pipeline={pipeline}"
        raise Refused(f"connect: experts={experts} with {other} is not supported; leave one of the two out")
    if place.type == "cpu":
        keep_freed_memory()
    return place, parsed, pipeline


def _same_grid(asked: list[str]) -> tuple[Grid, int]:
    """The grid and the number of stages that all ranks ask for, checked against how many they are."""
    each = [(Grid.parse(grid), [*map(int, numbers)]) for grid, *numbers in map(str.split, asked)]
    grid, (stages, *shared) = each[0]
    for rank, (other, (of_other, *its)) in enumerate(each):
        for name, ours, theirs in zip(("context", "experts"), shared, its, strict=True):
            if theirs != ours:
                raise ValueError(f"connect: rank 0 asks for {name}={ours} and rank {rank} for {theirs}; pass one")
        if (other, of_other) != (grid, stages):
            raise ValueError(
                f"connect: rank 0 asks for grid {grid.in_stages(stages)} and rank {rank} for"
                f" {other.in_stages(of_other)}; pass one grid"
            )
    check_ranks("connect", grid, stages, len(asked))
    return grid, stages


def _backends(device: torch.device) -> str:
    """What init_process_group is told: object collectives travel as CPU tensors on any device."""
    return "axo" if device.type == "cpu" else f"cpu:axo,{device.type}:axo"


def _world_of_process_group(
    device: torch.device, seconds: float, group: dist.ProcessGroup | None
) -> Communicator | None:
    """The communicator of the process group (the default one), where that is one of Axo's: it serves both."""
    if device.type != "cpu":
        return None
    group = group or dist.distributed_c10d._get_default_group()
    backend = group._get_backend(device) if device in group._device_types else None
    if not isinstance(backend, _C.C10dBackend):
        return None
    return Communicator(backend.communicator, name="world", axis="world", timeout=seconds, borrowed=True)


def _connect_alone(grid: Grid, device: torch.device, stages: int) -> Communicators:
    count = stages * grid.world_size
    if count != 1:
        raise ValueError(
            f"connect: grid {grid.in_stages(stages)} has {count} ranks and this process is alone; "
            f"start it with torchrun --nproc-per-node {count}, or use grid 1x1x1x1"
        )
    return Communicators(grid, 0, alone("world", device), False, _DEFAULT_TIMEOUT_S)


def _in_seconds(name: str, time: float | timedelta) -> float:
    number = isinstance(time, int | float) and not isinstance(time, bool)
    seconds = time.total_seconds() if isinstance(time, timedelta) else float(time) if number else math.nan
    if not 1e-3 <= seconds <= _LONGEST_S:
        raise ValueError(f"connect: {name}={time!r} is not a number of seconds from 0.001 to {_LONGEST_S:g} (30 years)")
    return seconds
