"""The module that users see.

Owns the net's construction, its modes, and the two ways to run a batch: `step`, and `forward` with `backward`. What a solve does is in `_solve.py`.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from torch_accl import _native

from ._audit import Audit, Excess
from ._blocks import Block, Kind, built, undisturbed
from ._cycle import Cycle
from ._failures import LayerParallelError, described, sentence
from ._net import Layers
from ._plans import Net, Plans, Program
from ._serial import Serial
from ._solve import Norms, Solve, Solver, split
from ._tree import is_state
from ._wire import Wire

__all__ = ["LayerParallel", "step"]


Mode = Literal["inexact", "exact-forward", "exact-wave", "exact-pipeline"]
MODES: tuple[Mode, ...] = ("inexact", "exact-forward", "exact-wave", "exact-pipeline")
WAVE = Cycle(levels=1)
_KEPT_AUDITS = 1000

LossFunction = Callable[[Any, Any], Tensor]


class LayerParallel(nn.Module):
    """A net whose layers are spread over ranks, which all work on one batch at once.

    layers: one entry a layer, on all ranks the same: `ode(f)`, `timed(f)`, `residual(block)`, `plain(layer)`, or a module, which is a plain layer.
        Each takes a module, or a function of the layer's number that builds it; then only the owner builds it, from a seed of its own.
    mesh, group: the ranks that the layers lie on, in order: a mesh of one dimension, or a process group. Without either, the default group.
    horizon: the length of time that all steps of `ode` and `timed` layers make together; dt is that divided by their number and that of
        `residual` ones.
    seed: what the layers are built from and draw from, with their number.
    mode: `"inexact"`, `"exact-forward"`, `"exact-wave"` or `"exact-pipeline"`; it may be changed between batches.
    fwd, bwd: how the passes of the inexact modes are solved.
    buffer_layers: so many steps at the beginning and at the end are never part of a coarse step.
    placement: `"aligned"`, `"even"`, or the number of layers of each rank.
    micro_batches, schedule: of `"exact-pipeline"`: into how many parts a batch is split, by default one for each rank, and `"1f1b"` or `"gpipe"`.
    replica: which of the data-parallel copies this is, each of which draws other random numbers; by default its place among groups like `group`.
    audit_every: every so many batches of an inexact mode `step` runs the batch a second time, exactly, with the same random numbers, and says in `audits` how wrong
        it was; it takes the time of a wave and the memory of a second set of gradients. 0: never.
    audit_limit, on_excess: where gradients are further off than this share, `"warn"` says so, `"more"` adds an iteration to both passes as well, and
        `"exact"` goes on in `exact-pipeline`.
    """

    def __init__(
        self,
        layers: Sequence[Block | nn.Module],
        *,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        horizon: float = 1.0,
        seed: int = 0,
        mode: Mode = "inexact",
        fwd: Cycle = Cycle(),  # noqa: B008  it is frozen
        bwd: Cycle = Cycle(iterations=1),  # noqa: B008
        buffer_layers: tuple[int, int] = (0, 0),
        placement: str | Sequence[int] = "aligned",
        micro_batches: int | None = None,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        replica: int | None = None,
        audit_every: int = 0,
        audit_limit: float = 0.5,
        on_excess: Excess = "warn",
    ) -> None:
        super().__init__()
        blocks = _apart(_blocks(layers), buffer_layers)
        self._wire = Wire(_group(mesh, group))
        kinds = [block.kind for block in blocks]
        specs = tuple((block.kind, block.is_apart) for block in blocks)
        aligned = fwd if mode == "inexact" else bwd if mode == "exact-forward" else WAVE
        counts = _placed(specs, placement, self._wire.size, aligned)
        net = Net(specs, counts)
        steps = sum(kind != "plain" for kind in kinds)
        own = {layer: built(blocks[layer], layer, seed) for layer in net.owned(self._wire.rank)}
        self.layers = nn.ModuleDict({str(layer): module for layer, module in own.items()})
        self._plans = Plans(net, self._wire.rank)
        self._solver = Solver(
            self._wire,
            self._plans,
            Layers(self.layers, kinds, horizon / max(steps, 1), seed),
            _names(blocks, own),
            replica_of(self._wire.ranks) if replica is None else replica,
        )
        self._settings = f"layers {specs}; placement {counts}; horizon {horizon}; seed {seed}; audits {audit_every} {audit_limit} {on_excess}"
        self._anchor = torch.zeros((), requires_grad=True)
        self.norms = Norms()
        self._cycles = {"forward": fwd, "adjoint": bwd}
        self._schedule = schedule
        self._micro_batches = self._wire.size if micro_batches is None else micro_batches
        if self._micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: give 1 or more")
        if schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"schedule={schedule!r}: give 1f1b or gpipe")
        if audit_every < 0:
            raise ValueError(f"audit_every={audit_every}: give a number of batches, or 0 for never")
        if on_excess not in ("warn", "more", "exact"):
            raise ValueError(f"on_excess={on_excess!r}: give one of warn, more, exact")
        self._audit_every, self._audit_limit, self._on_excess = audit_every, audit_limit, on_excess
        # The last ones, the newest last.
        self.audits: deque[Audit] = deque(maxlen=_KEPT_AUDITS)
        self._mode: Mode = "exact-wave"
        self.mode = mode

    # ---- settings

    @property
    def mode(self) -> Mode:
        """How batches are run. Changing it, on all ranks, moves no parameter and no optimiser state."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: give one of {', '.join(MODES)}")
        if mode == "inexact":
            self._check(self._cycles["forward"])
        if mode in ("inexact", "exact-forward"):
            self._check(self._cycles["adjoint"])
        self._mode = mode

    @property
    def fwd(self) -> Cycle:
        """How the forward pass is solved where it is not exact."""
        return self._cycles["forward"]

    @fwd.setter
    def fwd(self, cycle: Cycle) -> None:
        self._check(cycle)
        self._cycles["forward"] = cycle

    @property
    def bwd(self) -> Cycle:
        """How the backward pass is solved where it is not exact."""
        return self._cycles["adjoint"]

    @bwd.setter
    def bwd(self, cycle: Cycle) -> None:
        self._check(cycle)
        self._cycles["adjoint"] = cycle

    @property
    def owned(self) -> range:
        """The numbers of this rank's layers."""
        return self._plans.net.owned(self._wire.rank)

    def owner(self, layer: int) -> int:
        """The rank of the layers that has one."""
        return self._plans.net.owner(layer)

    @property
    def is_first(self) -> bool:
        """Whether this rank gives the input."""
        return self._wire.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the output, the target and the loss."""
        return self._wire.rank == self._wire.size - 1

    def _check(self, cycle: Cycle) -> None:
        _native.layer_levels(list(self._plans.net.layers), cycle.factors())

    # ---- audits

    def _is_audited(self, mode: Mode, number: int) -> bool:
        return self._audit_every > 0 and mode in ("inexact", "exact-forward") and number % self._audit_every == 0

    def _take_over(self, audit: Audit) -> None:
        """Keeps an audit, and does what is to be done about it: the same on all ranks, since all have the same figures."""
        self.audits.append(audit)
        if audit.gradient_error <= self._audit_limit:
            return
        remedy = "more iterations or an exact mode make it better"
        if self._on_excess == "more":
            self._cycles = {
                name: replace(cycle, iterations=cycle.iterations + 1) for name, cycle in self._cycles.items()
            }
            fwd, bwd = self._cycles["forward"].iterations, self._cycles["adjoint"].iterations
            remedy = f"from now on there are {fwd} forward and {bwd} backward iterations"
        elif self._on_excess == "exact":
            self.mode = "exact-pipeline"
            remedy = "from now on the mode is exact-pipeline"
        if self.is_first:
            warnings.warn(
                f"layer-parallel training, {audit}, which is over {self._audit_limit:.2%}; {remedy}", stacklevel=2
            )

    # ---- the same net on one rank

    @classmethod
    def from_serial(cls, layers: Serial | nn.ModuleList, kind: Kind = "residual", **settings: Any) -> LayerParallel:
        """A net of these layers, on all ranks the same: what `to_serial` has returned, or a list, all of one kind. The others' layers are let go."""
        if isinstance(layers, Serial):
            blocks = layers.blocks()
            settings.setdefault("horizon", layers.dt * max(sum(k != "plain" for k in layers.kinds), 1))
        else:
            blocks = [Block(layer, kind) for layer in layers]
        return cls(blocks, **settings)

    def to_serial(self) -> Serial:
        """A copy of the whole net, on all ranks, which call this together: parameters, buffers, dt."""
        layers = self._solver.layers
        try:
            mine, cause = pickle.dumps(layers.modules), None
        except Exception as error:
            mine, cause = b"", described(error)
        of_all = self._wire.gathered((mine, cause))
        if any(cause is not None for _, cause in of_all):
            causes = [f"exporting its layers: {cause}" if cause else None for _, cause in of_all]
            raise LayerParallelError(sentence(causes, "Layers that are exported must be picklable."))
        found = {layer: module for part, _ in of_all for layer, module in pickle.loads(part).items()}
        modules = [found[layer] for layer in range(len(found))]
        return Serial(modules, layers.kinds, layers.dt).train(self.training)

    # ---- a batch

    def step(
        self, x: Any = None, target: Any = None, loss_fn: LossFunction | None = None, *, loss_scale: float = 1.0
    ) -> Tensor:
        """Forward, loss and backward of one batch, on all ranks together; the gradients are added to `.grad`.

        x counts on the first rank, target and loss_fn on the last. Returns the same detached loss on all ranks. `loss_scale` multiplies the
        gradients, for a gradient scaler. A wrapper such as DistributedDataParallel is given to `layer_parallel.step`.
        """
        return step(self, x, target, loss_fn, loss_scale=loss_scale)

    def forward(self, x: Any = None) -> Any:
        """The net of x, which counts on the first rank. The last rank gets its output; the others get a number without meaning, to call `backward()` on.

        In training the passes are solved as the mode says, and a pipeline goes all forward before it goes backward. In evaluation all is exact.
        """
        if isinstance(x, _Job):
            return self._everything(x)
        run = _Run(self, x)
        if not torch.is_grad_enabled():
            with run.begun(is_recorded=False) as solve:
                found = solve.forward(run.way.forward)
            self.norms = solve.norms
            return solve.output(found) if found else self._anchor.detach()
        outputs = _Through.apply(run, self._anchor, len(run.given), *run.given, *run.parameters)
        return run.solve.joined(outputs) if run.has_output else outputs[0]

    def _everything(self, job: _Job) -> Tensor:
        run = _Run(self, job.x, is_step=True)
        anchor: Tensor = _Everything.apply(run, job, self._anchor, len(run.given), *run.given, *run.parameters)
        return anchor

    def _way(self) -> _Way:
        mode, plans, micro_batches = (self._mode if self.training else "exact-wave"), self._plans, 1
        forward, adjoint = (self._cycles["forward"], self._cycles["adjoint"]) if mode == "inexact" else (WAVE, WAVE)
        if mode == "exact-forward":
            adjoint = self._cycles["adjoint"]
        if mode == "exact-pipeline":
            micro_batches = self._micro_batches
            programs = plans.pipeline("forward", micro_batches), plans.pipeline("adjoint", micro_batches)
        else:
            programs = plans.solve("forward", forward), plans.solve("adjoint", adjoint)
        shown = f"mode {mode}; fwd {forward}; bwd {adjoint}; micro_batches {micro_batches}; schedule {self._schedule}; training {self.training}"
        return _Way(mode, *programs, micro_batches, f"{self._settings}; {shown}")


def step(
    model: nn.Module, x: Any = None, target: Any = None, loss_fn: LossFunction | None = None, *, loss_scale: float = 1.0
) -> Tensor:
    """`LayerParallel.step` for a wrapped net: `model` is one in DistributedDataParallel, or in FSDP2.

    All is done in the wrapper's forward pass, and the gradients are handed out in its backward pass, each once.
    """
    job = _Job(x, target, loss_fn, loss_scale)
    anchor = model(job)
    if not isinstance(anchor, Tensor) or job.loss is None:
        raise TypeError(
            f"step() takes a LayerParallel, or a wrapper around one whose forward hands its argument on, and got {type(model).__name__}"
        )
    anchor.backward()  # type: ignore[no-untyped-call]
    return job.loss


@dataclass
class _Job:
    """A batch of `step`, on its way through whatever wraps the net."""

    x: Any
    target: Any
    loss_fn: LossFunction | None
    loss_scale: float
    loss: Tensor | None = None

    def loss_of(self, y: Any, micro_batch: int, micro_batches: int) -> Tensor:
        """Of the output of a micro-batch: its share of the batch's loss."""
        assert self.loss_fn is not None
        target = self.target
        if micro_batches > 1:
            target = pytree.tree_map(lambda leaf: leaf.chunk(micro_batches)[micro_batch], target)
        return self.loss_fn(y, target) * (1 / micro_batches) if micro_batches > 1 else self.loss_fn(y, target)

    def wrong(self, wire: Wire, micro_batches: int) -> BaseException | None:
        """What the last rank cannot begin with."""
        if wire.rank != wire.size - 1:
            return None
        if self.loss_fn is None:
            return ValueError("there is no loss_fn; give one on the last rank")
        if self.target is None:
            return ValueError("there is no target; give one on the last rank")
        if isinstance(self.loss_fn, nn.Module) and any(p.requires_grad for p in self.loss_fn.parameters()):
            return ValueError(
                "the loss function has parameters, which would get no gradient; make them a last plain layer of the net"
            )
        if micro_batches > 1:
            try:
                split(self.target, micro_batches)
            except Exception as error:
                return type(error)(str(error).replace("the input", "the target"))
        return None


@dataclass(frozen=True)
class _Way:
    """How a batch is run."""

    mode: Mode
    forward: Program
    adjoint: Program
    micro_batches: int
    settings: str


class _Run:
    """A batch between its forward and its backward pass."""

    def __init__(self, model: LayerParallel, x: Any, *, is_step: bool = False) -> None:
        self.model = model
        self._is_step = is_step
        self.way = model._way()
        self.solver = model._solver
        self.found = self.solver.layers.parameters()
        self.parameters = self.found[0]
        self.has_output = model._wire.rank == model._wire.size - 1
        self.solve: Solve
        self.is_over = False
        self._x = x
        self.wrong: BaseException | None = None
        if is_step and not torch.is_grad_enabled():
            self.wrong = RuntimeError(
                "step() makes gradients, and they are off here; leave no_grad, or call the net itself"
            )
        try:
            self.solver.layers.check()
        except TypeError as error:
            self.wrong = error
        # The leaves of the input that may want a gradient.
        self.given: list[Tensor] = []
        if model._wire.rank == 0:
            if x is None:
                self.wrong = ValueError("there is no input; give one on the first rank")
            else:
                self.given = [leaf for leaf in pytree.tree_leaves(x) if is_state(leaf)]

    def begun(self, wrong: BaseException | None = None, *, is_recorded: bool) -> AbstractContextManager[Solve]:
        """The solve."""
        way = self.way
        call = "step()" if self._is_step else "forward()"
        settings = f"{way.settings}; called by {call} with gradients {'on' if is_recorded else 'off'}"
        return self.solver.batch(
            self._x,
            self.found,
            settings,
            self.wrong or wrong,
            micro_batches=way.micro_batches,
            is_recorded=is_recorded,
        )


class _Through(torch.autograd.Function):
    """The forward pass of a net, and in its backward pass the adjoint."""

    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor, given: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        with run.begun(is_recorded=True) as solve:
            found = solve.forward(run.way.forward)
        run.solve, run.model.norms = solve, solve.norms
        ctx.run, ctx.given = run, given
        ctx.set_materialize_grads(False)
        # Ranks without output have something to call `backward()` on.
        return tuple(solve.shown(found)) if found else (anchor.detach().clone(),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        if run.is_over:
            raise RuntimeError(
                "backward() of a layer-parallel net a second time: what its layers had left for it is gone; run forward again"
            )
        run.is_over = True
        solve = run.solve
        with undisturbed():
            found = solve.backward(run.way.adjoint, solve.cut(cotangents) if run.has_output else [])
            run.solver.close(solve)
        inputs: list[Tensor | None] = [None] * ctx.given
        if found:
            inputs = list(solve.together(found))
        gradients = solve.batch.evaluation.gradients
        return None, None, None, *inputs, *gradients


class _Everything(torch.autograd.Function):
    """A whole batch in the forward pass; the backward pass hands its gradients out."""

    @staticmethod
    def forward(ctx: Any, run: _Run, job: _Job, anchor: Tensor, given: int, *tensors: Tensor) -> Tensor:
        model, way = run.model, run.way
        wire = model._wire
        audit: Audit | None = None
        with run.begun(job.wrong(wire, way.micro_batches), is_recorded=True) as solve:
            if way.mode == "exact-pipeline":
                program = model._plans.pipeline(model._schedule, way.micro_batches)
                inputs = solve.pipeline(program, job.loss_of, job.loss_scale)
            else:
                found = solve.forward(way.forward)
                cotangents = [solve.lost(0, states, job.loss_of, job.loss_scale) for states in found]
                inputs = solve.backward(way.adjoint, cotangents)
                if model._is_audited(way.mode, solve.batch.number):
                    forward, adjoint = model._plans.solve("forward", WAVE), model._plans.solve("adjoint", WAVE)
                    audit = solve.audit(found, forward, adjoint, job.loss_of, job.loss_scale)
        model.norms = solve.norms
        if audit is not None:
            model._take_over(audit)
        job.loss = solve.known_loss
        of_input: list[Tensor | None] = [*solve.together(inputs)] if inputs else [None] * given
        ctx.gradients = [*of_input, *solve.batch.evaluation.gradients]
        return anchor.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = ctx.gradients
        by = float(scale)
        if by != 1.0:
            gradients = [None if gradient is None else gradient * by for gradient in gradients]
        return None, None, None, None, *gradients


# ---- construction


def _blocks(layers: Sequence[Block | nn.Module]) -> list[Block]:
    blocks = []
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            layer = Block(layer)
        if not isinstance(layer, Block):
            raise TypeError(
                f"layer {number} is {type(layer).__name__}; give a module, or ode(f), timed(f), residual(block) or plain(layer) with a "
                "module or a function of the layer's number that builds it"
            )
        blocks.append(layer)
    if not blocks:
        raise ValueError("a net without layers; give at least one")
    return blocks


def _apart(blocks: list[Block], buffer_layers: tuple[int, int]) -> list[Block]:
    steps = [number for number, block in enumerate(blocks) if block.kind != "plain"]
    first, last = buffer_layers
    if first < 0 or last < 0:
        raise ValueError(f"buffer_layers={buffer_layers}: give two numbers from 0")
    outside = set(steps[:first]) | set(steps[len(steps) - last :] if last else [])
    return [block.apart() if number in outside else block for number, block in enumerate(blocks)]


def _placed(
    specs: tuple[tuple[str, bool], ...], placement: str | Sequence[int], ranks: int, cycle: Cycle
) -> tuple[int, ...]:
    if not isinstance(placement, str):
        counts = tuple(placement)
        if len(counts) != ranks or sum(counts) != len(specs) or min(counts) < 0:
            raise ValueError(
                f"placement={list(counts)}: give {ranks} numbers, one a rank, that make {len(specs)} layers together"
            )
        return counts
    return tuple(_native.layer_placement(list(specs), cycle.factors(), ranks, placement))


def _names(blocks: Sequence[Block], own: dict[int, nn.Module]) -> list[str]:
    def name(number: int, block: Block) -> str:
        module = own.get(number, block.module)
        return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "layer")

    return [name(number, block) for number, block in enumerate(blocks)]


def replica_of(ranks: Sequence[int]) -> int:
    """The place of a group, by the ranks that it has of all, among the groups of as many ranks with the same stride that all fall into."""
    if len(ranks) < 2:
        return ranks[0]
    stride = ranks[1] - ranks[0]
    return ranks[0] if stride < 1 else ranks[0] % stride + ranks[0] // (stride * len(ranks)) * stride


def _group(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if mesh is not None and group is not None:
        raise ValueError("mesh and group are both given; give one of them")
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh has {mesh.ndim} dimensions; give the one that the layers lie on, as mesh['lp']")
        return mesh.get_group()
    if group is not None:
        return group
    return dist.group.WORLD if dist.is_initialized() else None
