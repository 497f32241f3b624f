"""A list of layers over ranks.

Owns the net's construction, its placement, parameters that ranks share, and its way to one rank and back. How it is run is in `_model.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_accl import _native

from ._agreed import agreed
from ._audit import Excess
from ._blocks import Block, Kind, built
from ._copies import Copied, Copies
from ._cycle import Cycle
from ._failures import LayerParallelError, described, sentence
from ._model import WAVE, Mode, Model, Schedule, group_of, replica_of
from ._net import Layers
from ._plans import Net, Plans
from ._serial import Serial
from ._solve import Guess, Solve, Solver
from ._spatial import Spatial
from ._ties import Ties, shared_names
from ._wire import Wire

__all__ = ["LayerParallel"]


class LayerParallel(Model):
    """A net whose layers are spread over ranks, which all work on one batch at once. All of these ranks build it together.

    layers: one entry a layer, on all ranks the same: `ode(f)`, `timed(f)`, `residual(block)`, `custom(layer)`, `plain(layer)`, or a module, which is a plain layer.
        Each takes a module, or a function of the layer's number that builds it; then only the owner builds it, from a seed of its own.
    mesh, group: the ranks that the layers lie on, in order: a mesh of one dimension, or a process group; `"alone"`: this rank by itself. Without either, the
        default group.
    horizon: the length of time that all steps of `ode` and `timed` layers make together; dt is that divided by their number and that of
        `residual` and `custom` ones.
    seed: what the layers are built from and draw from, with their number.
    mode: `"inexact"`, `"exact-forward"`, `"converged"`, `"exact-wave"`, `"exact-pipeline"` or `"auto"`; it may be changed between batches.
    fwd, bwd: how the passes of the inexact modes are solved.
    guess: what `Cycle(start="guess")` begins with: a function from the number of a point, i before layer i, to a state.
    spatial: how states become coarser and finer, `Spatial(coarsen, refine)`, on the levels that `Cycle(coarser=...)` names.
    buffer_layers: so many steps at the beginning and at the end are never part of a coarse step.
    placement: `"aligned"`, `"even"`, or the number of layers of each rank.
    micro_batches, schedule: of `"exact-pipeline"`: into how many parts a batch is split, by default one for each rank, and `"1f1b"` or `"gpipe"`.
    side_per_sample: names of side inputs of which a micro-batch gets its part of the first dimension, as of the input; of others all.
    checkpoint: keep of every layer but the first of each coarse step only its input, and evaluate it anew in the backward pass.
    auto_modes: what `"auto"` chooses from, by measured times: by default `"exact-wave"` and `"inexact"`, and `"exact-pipeline"` if `micro_batches` is given. The
        first one is taken unless another is faster by 3 %.
    tolerance, max_iterations: of `"converged"`: a pass goes on until its residual norm is at most that share of its first one, or falls no more, or for so many iterations.
    tie: groups of names of parameters, `("layers.0.weight", "layers.9.weight")`, that are one: they begin with the first one's values, and each gets the sum of
        their gradients. What is one parameter in several of the modules given is tied without being named.
    replica: which of the data-parallel copies this is, each of which draws other random numbers; by default its place among groups like `group`.
    audit_every: every so many batches of an inexact mode `step` runs the batch a second time, exactly, with the same random numbers, and says in `audits` how wrong
        it was; it takes the time of a wave and the memory of a second set of gradients. 0: never.
    audit_limit, on_excess: where gradients are further off than this share, `"warn"` says so, `"more"` adds an iteration to both passes as well, and
        `"exact"` goes on in `exact-pipeline`.
    probe_every, on_stall: every so many batches of an inexact mode there are twice as many iterations, at least three, and `probes` says by what the last one made residuals smaller;
        where it made them no smaller, what is done is as for `on_excess`.
    """

    def __init__(
        self,
        layers: Sequence[Block | nn.Module],
        *,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | Literal["alone"] | None = None,
        horizon: float = 1.0,
        seed: int = 0,
        mode: Mode = "inexact",
        fwd: Cycle = Cycle(),  # noqa: B008  it is frozen
        bwd: Cycle = Cycle(iterations=1),  # noqa: B008
        guess: Guess | None = None,
        spatial: Spatial | None = None,
        buffer_layers: tuple[int, int] = (0, 0),
        placement: str | Sequence[int] = "aligned",
        micro_batches: int | None = None,
        schedule: Schedule = "1f1b",
        side_per_sample: Collection[str] = (),
        checkpoint: bool = False,
        auto_modes: Sequence[Mode] | None = None,
        tolerance: float = 1e-4,
        max_iterations: int = 30,
        tie: Sequence[Sequence[str]] = (),
        replica: int | None = None,
        audit_every: int = 0,
        audit_limit: float = 0.5,
        on_excess: Excess = "warn",
        probe_every: int = 0,
        on_stall: Excess = "warn",
    ) -> None:
        super().__init__(
            Wire(group_of(mesh, group)),
            mode=mode,
            fwd=fwd,
            bwd=bwd,
            micro_batches=micro_batches,
            schedule=schedule,
            checkpoint=checkpoint,
            auto_modes=auto_modes,
            tolerance=tolerance,
            max_iterations=max_iterations,
            audit_every=audit_every,
            audit_limit=audit_limit,
            on_excess=on_excess,
            probe_every=probe_every,
            on_stall=on_stall,
        )
        blocks = _apart(_blocks(layers), buffer_layers)
        kinds = [block.kind for block in blocks]
        specs = tuple((block.kind, block.is_apart) for block in blocks)
        aligned = fwd if mode in ("inexact", "converged") else bwd if mode == "exact-forward" else WAVE
        counts = _placed(specs, placement, self._wire.size, aligned)
        net = Net(specs, counts)
        steps = sum(kind != "plain" for kind in kinds)
        own: dict[int, nn.Module] = {}

        def build() -> None:
            own.update({layer: built(blocks[layer], layer, seed) for layer in net.owned(self._wire.rank)})

        agreed(self._wire, "building its layers", "", build, is_for_all=True)
        self.layers = nn.ModuleDict({str(layer): module for layer, module in own.items()})
        self._solver = Solver(
            self._wire,
            Plans(net, self._wire.rank),
            Layers(self.layers, kinds, horizon / max(steps, 1), seed),
            _names(blocks, own),
            replica_of(self._wire.ranks) if replica is None else replica,
        )
        given = [block.module for block in blocks]
        self._ties = Ties([*tie, *shared_names(given, net.owner)], net.owner, self._solver.layers.modules, self._wire)
        self._solver.layers.not_counted = self._ties.not_counted
        if self._ties.names:
            self._solver.copies = self._copies = Copies(self._wire, self.copied, "give all of them the same values")
            self._copies.check("building the net")
            self.register_state_dict_pre_hook(_made_equal)  # type: ignore[no-untyped-call]
        self._horizon, self._placement = horizon, placement
        self._solver.shared.guess = guess
        self._solver.shared.spatial = spatial
        self._solver.shared.per_sample = frozenset(side_per_sample)
        self._settings += f"; layers {specs}; placement {counts}; horizon {horizon}; seed {seed}; parts {sorted(side_per_sample)}; tie {self._ties.names}; spatial {spatial is not None}"
        self.mode = mode

    @property
    def owned(self) -> range:
        """The numbers of this rank's layers."""
        return self._plans.net.owned(self._wire.rank)

    def owner(self, layer: int) -> int:
        """The rank of the layers that has one."""
        return self._plans.net.owner(layer)

    def copied(self) -> list[Copied]:
        """The tied parameters."""
        return self._ties.copied(self._solver.layers.modules)

    def tied_names(self) -> dict[str, str]:
        """For each tied parameter of this rank, the first name of its group: what is compressed of copies has that name in common."""
        own = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return {name: names[0] for names in self._ties.names for name in names if name in own}

    def settled(self, solve: Solve) -> None:
        """Brings what ranks know of the gradients of tied parameters and of side inputs together."""
        try:
            self._ties.add_up(solve.batch.evaluation, f"batch {solve.batch.number}")
        except ValueError as error:
            solve.batch.fail(f"adding up gradients, batch {solve.batch.number}", error)
        super().settled(solve)

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
        if self._copies is not None:
            self._copies.make_equal("to_serial()")
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
        return Serial(modules, layers.kinds, layers.dt, self._ties.names).train(self.training)


# ---- construction


def _made_equal(net: LayerParallel, prefix: str, keep_vars: bool) -> None:
    """What is saved has copies that are equal: they were last compared before the last step of the optimizer."""
    if net._copies is not None:
        net._copies.make_equal(
            "state_dict() of a net with tied parameters, which all ranks of the layers call together"
        )


def _blocks(layers: Sequence[Block | nn.Module]) -> list[Block]:
    blocks = []
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            layer = Block(layer)
        if not isinstance(layer, Block):
            raise TypeError(
                f"layer {number} is {type(layer).__name__}; give a module, or ode(f), timed(f), residual(block), custom(layer) or plain(layer) with a "
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
