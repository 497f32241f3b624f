"""The names that scripts of torchbraid take from its module `mgopt`: nested iteration and MG/Opt over models of several
depths.

Owns the solver by torchbraid's names, its printed output, and two small functions. Options are in `_mgopt_options.py`,
the V-cycle in `_mgopt_cycle.py`.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ._communicator import Comm
from ._layer_parallel import LayerParallel
from ._mgopt_cycle import Cycle, LevelPair
from ._mgopt_levels import Batch, Draws, Level, Transfer, model_of, on_device
from ._mgopt_options import (
    Option,
    criterion_of,
    factory_arguments,
    interpolation_of,
    levelled,
    line_search_of,
    optimizer_of,
    restriction_of,
    shown,
    states_of,
)
from .utils import seed_from_rank

__all__ = ["compute_levels", "mgopt_solver", "root_print"]


def compute_levels(num_steps: int, min_coarse_size: int, cfactor: int) -> int:
    """Returns the number of levels that leaves at least `min_coarse_size` steps on the coarsest; at least 1.

    Raises:
        ValueError: `cfactor` is below 2, or `min_coarse_size` below 1.
    """
    if cfactor < 2 or min_coarse_size < 1:
        raise ValueError(
            f"compute_levels(min_coarse_size={min_coarse_size}, cfactor={cfactor}): give a min_coarse_size of at least 1 and a cfactor of at least 2"
        )
    levels = 1
    while min_coarse_size * cfactor**levels <= num_steps:
        levels += 1
    return levels


def root_print(rank: int, printlevel_cutoff: int, importance: int, s: object) -> None:
    """Prints on rank 0 if `importance` is at most the cutoff."""
    if rank == 0 and importance <= printlevel_cutoff:
        print(s, flush=True)


class mgopt_solver:
    """A hierarchy of models of the same equation, each with a `LayerParallel` as its `parallel_nn`; all methods are
    collective.

    `initialize_with_nested_iteration` trains the coarsest model, interpolates the next one from it in layer time,
    trains that, and so on. `mgopt_solve` then trains the finest one by V-cycles over all of them inside each batch.
    `levels[0]` is the finest.
    """

    class level:
        """A level: its model, its optimizer, and the options of its creation and training, each a name with its
        arguments."""

        model: nn.Module
        # Exists only if states of optimizers are kept from batch to batch.
        optimizer: Optimizer
        network: Option
        interp_params: Option
        optims: Option
        criterions: Option
        restrict_params: Option
        restrict_grads: Option
        restrict_states: Option
        interp_states: Option
        line_search: Option

        def __init__(self) -> None:
            # Length of each correction; None if the optimizer chose it.
            self.out_ls_step: list[float | None] = []
            # Number of parameters over all ranks: of all, and of the trained ones.
            self.counts = (0, 0)

    def __init__(self, device: torch.device | None = None) -> None:
        self.levels: list[mgopt_solver.level] = []
        self.device = torch.device("cpu") if device is None else torch.device(device)
        self.ni_rfactor = -1
        # Arguments of both methods, for `options_used`.
        self._reported: dict[str, Any] = {}

    # ---- nested iteration

    def initialize_with_nested_iteration(
        self,
        model_factory: Callable[..., nn.Module],
        ni_steps: Sequence[int],
        train_loader: Iterable[Any],
        test_loader: Iterable[Any] | None,
        networks: Sequence[Any],
        epochs: int = 1,
        log_interval: int = 1,
        mgopt_printlevel: int = 1,
        interp_params: Any = "tb_get_injection_interp_params",
        optims: Any = ("pytorch_sgd", {"lr": 0.01, "momentum": 0.9}),
        criterions: Any = "tb_mgopt_cross_ent",
        preserve_optim: bool = True,
        seed: int | None = None,
        zero_init_guess: bool = False,
    ) -> None:
        """Creates and trains a model for each of `ni_steps`, from the coarsest to the finest; each starts as the
        interpolated previous one.

        model_factory: `model_factory(k, **arguments)` returns a model; k is 0 for the coarsest, and the arguments are
            those in `networks`.
        ni_steps: steps of each model, the coarsest first, each a multiple of the one before by the same factor.
        train_loader, test_loader: pairs of an input and a target, the same number on all ranks; rank 0's values are
            used.
        networks: `("Factory", arguments)` for each level, the finest first.
        epochs: epochs for each level. 0 only creates the hierarchy.
        log_interval: batches between printed losses, if `mgopt_printlevel` is at least 1.
        interp_params, optims, criterions: names, or pairs of a name and arguments; one for all levels, or a list, the
            finest first. A loss may be a function `loss(output, target, **arguments)`, and an optimizer a function like
            `torch.optim.AdamW`.
        preserve_optim: whether the optimizer's state is kept from batch to batch, and for `mgopt_solve`.
        seed: seed of torch's random numbers, from which layers are created; None leaves them.
        zero_init_guess: whether all parameters start at zero.

        Raises:
            ValueError: an unknown option, or levels that do not fit together.
            TypeError: `model_factory` returns something else than such a model.
        """
        steps = [operator.index(count) for count in ni_steps]
        count = len(steps)
        self.ni_rfactor = _factor_of(steps)
        if len(networks) != count:
            raise ValueError(
                f"{len(networks)} networks and {count} ni_steps; give a network for each, the finest first"
            )
        networks = levelled("networks", list(networks), count)
        arguments = [factory_arguments(network) for network in networks]
        ways = levelled("interp_params", interp_params, count)
        interpolations = [interpolation_of(way) for way in ways]
        optimizers, losses = levelled("optims", optims, count), levelled("criterions", criterions, count)
        wanted = [criterion_of(loss) for loss in losses]
        if seed is not None:
            torch.manual_seed(seed_from_rank(seed, _rank()))
        self.levels = []
        self._reported = {"preserve_optim": bool(preserve_optim), "zero_init_guess": bool(zero_init_guess)}
        above: Level | None = None
        # From the coarsest to the finest; the lists start with the finest.
        for k, at in enumerate(reversed(range(count))):
            made = self.level()
            made.model = model_of(model_factory(k, **arguments[at])).to(self.device)
            made.network, made.interp_params = networks[at], ways[at]
            made.optims, made.criterions = optimizers[at], losses[at]
            if zero_init_guess:
                with torch.no_grad():
                    for parameter in made.model.parameters():
                        parameter.zero_()
            level = Level(made.model, wanted[at], optimizer_of(optimizers[at], made.model))
            if above is not None:
                Transfer(level, above, self.ni_rfactor, interpolations[at]).initialize()
            made.counts = _counts(level)
            if preserve_optim:
                assert level.optimizer is not None
                made.optimizer = level.optimizer
            say = _Printer(level.comm, mgopt_printlevel)
            say(
                1,
                f"\nnested iteration, model {k + 1} of {count}: {steps[k]} steps, {made.counts[0]} parameters, {made.counts[1]} of them trained",
            )
            renew = None if preserve_optim else lambda: optimizer_of(made.optims, made.model)  # noqa: B023
            _train(level, train_loader, test_loader, epochs, log_interval, self.device, say, renew)
            self.levels.insert(0, made)
            above = level

    # ---- MG/Opt

    def mgopt_solve(
        self,
        train_loader: Iterable[Any],
        test_loader: Iterable[Any] | None,
        epochs: int = 1,
        log_interval: int = 1,
        mgopt_tol: float = 0,
        mgopt_iter: int = 1,
        nrelax_pre: int = 1,
        nrelax_post: int = 1,
        nrelax_coarse: int = 5,
        mgopt_printlevel: int = 1,
        mgopt_levels: int | None = None,
        preserve_optim: bool = True,
        restrict_params: Any = "tb_get_injection_restrict_params",
        restrict_grads: Any = "tb_get_injection_restrict_params",
        restrict_states: Any = "tb_injection_restrict_network_state",
        interp_states: Any = "tb_injection_interp_network_state",
        line_search: Any = ("tb_simple_ls", {"ls_params": {"alphas": [0.001, 0.01, 0.1, 0.5, 1.0]}}),
    ) -> list[float]:
        """Trains the finest model, and the others with it. Returns, on all ranks, the loss of each batch before its
        last step.

        mgopt_tol: training ends after an epoch whose last loss is below it.
        mgopt_iter: V-cycles in each batch.
        nrelax_pre, nrelax_post, nrelax_coarse: steps of the optimizer before a correction, after it, and on the
            coarsest model.
        mgopt_levels: number of models to use, from the finest; None for all.
        preserve_optim: whether optimizers keep their states from batch to batch; otherwise each V-cycle begins with new
            ones.
        restrict_params, restrict_grads: restrictions of parameters and gradients. With
            `"accl_transposed_interp_params"` for gradients, the transpose of the interpolation, a coarse objective
            agrees with the finer one to first order.
        restrict_states, interp_states: have no effect.
        line_search: by level, how far a correction is followed.
        The others are described at `initialize_with_nested_iteration`.

        Raises:
            RuntimeError: there are no models.
            ValueError: an unknown option, or an invalid number.
        """
        if not self.levels:
            raise RuntimeError("mgopt_solve: there are no models; call initialize_with_nested_iteration before it")
        count = len(self.levels) if mgopt_levels is None else operator.index(mgopt_levels)
        if not 1 <= count <= len(self.levels):
            raise ValueError(
                f"mgopt_levels={mgopt_levels}: there are {len(self.levels)} models; give 1 to {len(self.levels)}"
            )
        for name, value, least in (
            ("mgopt_iter", mgopt_iter, 1),
            ("nrelax_pre", nrelax_pre, 0),
            ("nrelax_post", nrelax_post, 0),
            ("nrelax_coarse", nrelax_coarse, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: give {least} or more")
        given = {
            name: levelled(name, option, count)
            for name, option in (
                ("restrict_params", restrict_params),
                ("restrict_grads", restrict_grads),
                ("restrict_states", restrict_states),
                ("interp_states", interp_states),
                ("line_search", line_search),
            )
        }
        for name in ("restrict_states", "interp_states"):
            for option in given[name]:
                states_of(name, option)
        restrictions = [
            [restriction_of(name, option) for option in given[name]] for name in ("restrict_params", "restrict_grads")
        ]
        searches = [line_search_of(option) for option in given["line_search"]]
        used = self.levels[:count]
        for at, each in enumerate(used):
            for name, options in given.items():
                setattr(each, name, options[at])
        self._reported |= {
            "nrelax_pre": nrelax_pre,
            "nrelax_post": nrelax_post,
            "nrelax_coarse": nrelax_coarse,
            "preserve_optim": bool(preserve_optim),
        }
        levels = [Level(each.model, criterion_of(each.criterions), None) for each in used]
        self._equip(levels, is_kept=preserve_optim)
        pairs = []
        for at, (each, fine, coarse) in enumerate(zip(used, levels, levels[1:])):
            transfer = Transfer(fine, coarse, self.ni_rfactor, interpolation_of(each.interp_params))
            pairs.append(LevelPair(transfer, restrictions[0][at], restrictions[1][at], searches[at], each.out_ls_step))
        finest = levels[0]
        say = _Printer(finest.comm, mgopt_printlevel)
        cycle = Cycle(levels, pairs, pre=nrelax_pre, post=nrelax_post, coarse=nrelax_coarse, say=say)
        _check_length(finest.comm, train_loader)
        losses: list[float] = []
        for epoch in range(1, epochs + 1):
            log = _Log(say, epoch, train_loader, log_interval)
            for x, target in train_loader:
                x, target = on_device(x, self.device), on_device(target, self.device)
                with log.timed():
                    for _ in range(mgopt_iter):
                        if not preserve_optim:
                            self._equip(levels, is_kept=False)
                        number = finest.body.solver.shared.number
                        loss = cycle.run(Batch(x, target, number, Draws(self.device)))
                losses.append(loss)
                log.batch(loss)
            log.end()
            if test_loader is not None:
                for at, level in enumerate(levels if mgopt_printlevel >= 2 else levels[:1]):
                    _test(level, test_loader, self.device, say, f"level {at}, ")
            if losses and losses[-1] < mgopt_tol:
                break
        return losses

    def _equip(self, levels: Sequence[Level], *, is_kept: bool) -> None:
        """Gives levels their optimizers: the existing ones, or new ones."""
        for each, level in zip(self.levels, levels):
            if is_kept:
                if not hasattr(each, "optimizer"):
                    each.optimizer = optimizer_of(each.optims, each.model)
                level.optimizer = each.optimizer
            else:
                level.optimizer = optimizer_of(each.optims, each.model)

    # ---- information

    def operator_complexity(self) -> tuple[float, float, list[int], list[int]]:
        """Returns the parameters on all levels per parameter of the finest, for all and for the trained ones; and both
        counts of each level."""
        both = [list(counts) for counts in zip(*(each.counts for each in self.levels))] or [[], []]
        shares = [sum(counts) / counts[0] if counts and counts[0] else 0.0 for counts in both]
        return shares[0], shares[1], both[0], both[1]

    def get_total_param_count(self, model: nn.Module) -> tuple[int, int]:
        """Returns the number of a model's parameters, and of the trained ones, over all ranks. Collective."""
        inner = model_of(model).parallel_nn
        assert isinstance(inner, LayerParallel)
        return _total(inner.ranks, model)

    def __repr__(self) -> str:
        """Returns a table on rank 0; an empty text on the others."""
        if not self.levels:
            return "MG/Opt without models"
        if self._ranks().Get_rank() != 0:
            return ""
        total, trained, counts, of_trained = self.operator_complexity()
        lines = [
            f"MG/Opt on {self.device}: {len(self.levels)} levels",
            f"parameters on all levels per parameter of the finest level: {total:.3f}; trained ones only: {trained:.3f}",
        ]
        for at, (all_of_it, some) in enumerate(zip(counts, of_trained)):
            lines.append(f"  level {at}: {all_of_it} parameters, {some} of them trained")
        return "\n".join(lines)

    def options_used(self) -> None:
        """Prints, on rank 0, the arguments of both methods."""
        if not self.levels:
            raise RuntimeError("options_used: there are no models; call initialize_with_nested_iteration before it")
        lines = ["MG/Opt", *(f"  {name}: {value}" for name, value in self._reported.items())]
        names = [name for name in self.level.__annotations__ if name not in ("model", "optimizer")]
        for at, each in enumerate(self.levels):
            lines.append(f"level {at}")
            lines += [f"  {name}: {shown(getattr(each, name))}" for name in names if hasattr(each, name)]
        root_print(self._ranks().Get_rank(), 1, 1, "\n".join(lines))

    def _ranks(self) -> Comm:
        inner = self.levels[0].model.parallel_nn
        assert isinstance(inner, LayerParallel)
        return inner.ranks


# ---- numbers


def _factor_of(steps: Sequence[int]) -> int:
    """Returns the factor between successive numbers of steps; -1 for a single number."""
    if not steps or min(steps) < 1:
        raise ValueError(f"ni_steps={list(steps)}: give numbers of steps of at least 1, the coarsest first")
    factors = {after / before for before, after in itertools.pairwise(steps)}
    if len(factors) > 1 or any(factor < 2 or factor != int(factor) for factor in factors):
        raise ValueError(
            f"ni_steps={list(steps)}: give numbers that grow by the same integer factor of at least 2, such as 4, 8, 16"
        )
    return int(factors.pop()) if factors else -1


def _counts(level: Level) -> tuple[int, int]:
    return _total(level.comm, level.model)


def _total(comm: Comm, model: nn.Module) -> tuple[int, int]:
    own = [p.numel() for p in model.parameters()], [p.numel() for p in model.parameters() if p.requires_grad]
    of_all = comm.allgather([sum(each) for each in own])
    return sum(each for each, _ in of_all), sum(each for _, each in of_all)


def _rank() -> int:
    from . import _mpi as MPI

    return int(MPI.COMM_WORLD.Get_rank())


def _check_length(comm: Comm, loader: Iterable[Any]) -> None:
    """Checks that all ranks have the same number of batches: fewer on one rank would leave the others waiting."""
    lengths = comm.allgather(len(loader) if isinstance(loader, Sized) else None)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"train_loader has {lengths} batches on the ranks; give all ranks the same number of batches; only rank 0's are used"
        )


# ---- training and testing


class _Printer:
    """Prints texts of sufficient importance on rank 0."""

    def __init__(self, comm: Comm, level: int) -> None:
        self._rank, self._level = comm.Get_rank(), level

    def __call__(self, importance: int, text: str) -> None:
        root_print(self._rank, self._level, importance, text)


class _Log:
    """The printed lines about the batches of an epoch."""

    def __init__(self, say: _Printer, epoch: int, loader: Iterable[Any], interval: int) -> None:
        self._say, self._epoch, self._interval = say, epoch, max(1, interval)
        self._of = f" of {len(loader)}" if isinstance(loader, Sized) else ""
        self._batches, self._seconds, self._begun = 0, 0.0, time.perf_counter()
        self._loss = float("nan")
        self._is_said = True

    def timed(self) -> _Log:
        """Returns a context manager that times a batch's work."""
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._start

    def batch(self, loss: float) -> None:
        """Records a finished batch."""
        self._loss, self._is_said = loss, self._batches % self._interval == 0
        self._batches += 1
        if self._is_said:
            self._show()

    def end(self) -> None:
        """Ends the epoch."""
        if not self._is_said:
            self._show()
        self._say(1, f"  epoch {self._epoch}: {time.perf_counter() - self._begun:.2e} s")

    def _show(self) -> None:
        each = self._seconds / self._batches
        self._say(
            1, f"  epoch {self._epoch}, batch {self._batches}{self._of}: loss {self._loss:.9f}, {each:.6f} s a batch"
        )


def _train(
    level: Level,
    loader: Iterable[Any],
    test_loader: Iterable[Any] | None,
    epochs: int,
    interval: int,
    device: torch.device,
    say: _Printer,
    renew: Callable[[], Optimizer] | None,
) -> None:
    """Trains a model for some epochs; `renew`, if given, creates a new optimizer for each batch."""
    _check_length(level.comm, loader)
    for epoch in range(1, epochs + 1):
        level.model.train()
        log = _Log(say, epoch, loader, interval)
        for x, target in loader:
            x, target = on_device(x, device), on_device(target, device)
            with log.timed():
                if renew is not None:
                    level.optimizer = renew()
                loss = level.learn(x, target)
                assert level.optimizer is not None
                level.optimizer.step()
            log.batch(loss)
        level.model.zero_grad(set_to_none=True)
        log.end()
        if test_loader is not None:
            _test(level, test_loader, device, say, "")


@torch.no_grad()
def _test(level: Level, loader: Iterable[Any], device: torch.device, say: _Printer, of: str) -> None:
    """Prints the mean loss and, if targets are classes, the number of correct samples."""
    level.model.eval()
    _check_length(level.comm, loader)
    total, samples, right, has_classes = 0.0, 0, 0, False
    for x, target in loader:
        x, target = on_device(x, device), on_device(target, device)
        loss, output = level.tested(x, target)
        count = next((len(leaf) for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim()), 1)
        total, samples = total + loss * count, samples + count
        if (
            isinstance(target, Tensor)
            and not target.is_floating_point()
            and isinstance(output, Tensor)
            and output.dim() > 1
        ):
            has_classes = True
            right += int(output.argmax(1).flatten().eq(target.flatten()).sum()) if level.comm.Get_rank() == 0 else 0
    accuracy = f", {right} of {samples} right ({right / max(samples, 1):.2%})" if has_classes else ""
    say(1, f"  {of}test: mean loss {total / max(samples, 1):.4f}{accuracy}")
