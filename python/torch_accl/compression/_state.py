"""State of a hook between its calls: names of parameters, plans of its calls, figures of its traffic."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.distributed.tensor import DTensor

from .. import _native
from ._agreement import Progress, check_progress, check_settings, reduced
from ._auto import Choice, choose
from ._codecs import facts, for_feedback
from ._feedback import flush_residuals
from ._measures import Measures, Totals, table
from ._of_group import OfGroup, group_of
from ._optimizers import watch_for_adam
from ._plans import Part, Plan, plan_of
from ._residuals import Placed, ResidualsOfCall, ResidualStore, TensorResiduals
from ._saved import Saved
from ._scope import FLOATS, Op, codec_of_group, encoded, exact
from ._settings import AUTO, RAW, Codec, Compression, tensor_id

__all__ = ["REPLICAS", "CompressionState", "Traffic", "names_of"]

# Suffix of names of parameters and modules, for shards that are reduced between replicas (FSDP2).
REPLICAS = " (replicas)"

# Calls of a plan between two checks of its figures; all ranks check at the same calls.
CHECK_EVERY = 100

# A residual this many times the gradient is taken to grow without bound.
MOST_RESIDUAL = 10.0


@dataclass
class Traffic:
    """Bytes of the gradients that a rank contributed since the state was created: uncompressed, and as sent."""

    raw: int = 0
    sent: int = 0

    @property
    def ratio(self) -> float:
        """Compression ratio: uncompressed bytes divided by sent bytes; 1.0 before the first call."""
        return self.raw / self.sent if self.sent else 1.0


class CompressionState(OfGroup):
    """The state of `ddp_hook` or of `apply_fsdp2`, for one model.

    Args:
        compression: what is compressed and how; the same on all ranks. None, or a `Compression` without a codec, takes the codec of
            the group's `Options`.
        model: the model, wrapped or not; its parameters must not change afterwards.
        process_group: the group of the gradients; its backend for their device must be accl. It may be left out if the model is wrapped in
            DistributedDataParallel, whose group is then taken. Otherwise None is the default group.
        scaler: a gradient scaler (`torch.amp.GradScaler`). Its scale is read once per step, and residuals are rescaled with it.

    Attributes:
        world: number of ranks of the group.
        rank: this rank's number in the group.
        step: how many times all gradients were sent; for FSDP2, the number of calls of the module that had most.
        traffic: bytes before and after compression.

    A key of `layers` or `exclude` that matches no parameter causes a warning. At the first call, ranks compare their settings,
    their steps, and whose saved state each has loaded. If these do not fit together, all ranks raise a RuntimeError that names
    ranks.

    The state can be pickled and copied, for instance with its model by `torch.save(ddp)`, `copy.deepcopy` and
    `torch.optim.swa_utils.AveragedModel`. A copy in the process belongs to the same group. A file contains no group and no
    scaler.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `process_group` is not the group of the model, or parts of the model have different groups.
        RuntimeError: there is no group, its backend is not accl, or it reduces tensors on a parameter's device with another one.
    """

    # Set by the first state. From then on, calls outside hooks are not taken for gradients (see `compat.cgx`).
    is_any_made: ClassVar[bool] = False

    def __init__(
        self,
        compression: Compression | None = None,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        scaler: Any = None,
    ) -> None:
        if compression is not None and not isinstance(compression, Compression):
            raise TypeError(f"compression must be a Compression, not {type(compression).__name__}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"scaler must have get_scale, as torch.amp.GradScaler has, not {type(scaler).__name__}")
        super().__init__(group_of(model, process_group))
        compression = (compression or Compression()).of_group(codec_of_group(self.process_group))
        self.compression = compression
        self.scaler = scaler
        CompressionState.is_any_made = True
        self.step = 0
        self.traffic = Traffic()
        self._names = names_of(model)
        # Keys by name. Ranks may have different names for one tied parameter, and the key makes all compress it alike.
        self._keys = _keys_of(model, self._names)
        # `_names` is keyed by `id()`, so the parameters must stay alive.
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            # A parameter on meta has no memory yet.
            if not parameter.is_meta:
                self.check_device(_device_of_gradient(parameter))
        self._plans: dict[tuple[object, ...], Plan] = {}
        # Figures of replaced plans, by name.
        self._past: dict[str, _Figures] = {}
        # By name; for shards between replicas by name and `REPLICAS`. No call uses them any more once a thread has waited for it.
        self._residual_store = ResidualStore()
        # FSDP2: number of calls of each module.
        self._calls: dict[str, int] = {}
        # Codecs of parameters that were changed during training, and choices of `codec="auto"`.
        self._decided: dict[str, Codec | None] = {}
        self._choices: dict[str, Choice] = {}
        # Times for `codec="auto"` by elements of a call, type and codec. Shards between replicas use other groups: own times.
        self._times: dict[str, dict[tuple[int, torch.dtype, str], float]] = {"": {}, REPLICAS: {}}
        # Groups whose ranks have compared their settings with each other.
        self._checked: WeakSet[dist.ProcessGroup] = WeakSet()
        # The loaded state, without its residuals.
        self._loaded: Saved | None = None
        # Scale of the gradient scaler, and the step at which it was read.
        self._scale: float | None = None
        self._scale_read_at: int | None = None
        for codec in compression.codecs():
            known = facts(codec)
            if known.is_divergent:
                warnings.warn(
                    f"compression: the error of {codec} is larger than the gradient itself, so training is likely to "
                    f"diverge; use {facts(known.next_finer or RAW).short}, or {for_feedback()} with "
                    "error_feedback=True",
                    stacklevel=2,
                )
            if known.hides_magnitudes and compression.error_feedback:
                watch_for_adam(self._parameters, codec)
        for key in compression.unmatched([self._key_of(name) for name in self._names.values()]):
            warnings.warn(f"compression: {key!r} matches no parameter of the model", stacklevel=2)

    # ---- for users

    def codec_of(self, name: str) -> str | None:
        """Returns the codec of a parameter's parts of sums; None if it is sent unchanged. For inspection before training.

        Raises:
            KeyError: the model has no parameter of that name.
        """
        for parameter in self._parameters:
            if self._names[id(parameter)] == name:
                codec = self._codec(parameter)
                return None if codec is None else codec[1]
        raise KeyError(name)

    def measures(self) -> list[Measures]:
        """Returns figures of each parameter that was sent, in the order of the model's parameters.

        Shards between replicas have rows of their own. The figures are this rank's, except that with DistributedDataParallel the
        error of sums is the same on all ranks.
        """
        sums = dict(self._past)
        for plan in self._plans.values():
            _add_figures(sums, plan)
        rows = []
        for parameter, leg in itertools.product(self._parameters, ("", REPLICAS)):
            label = self._names[id(parameter)] + leg
            if label not in sums:
                continue
            totals, raw, sent, elements = sums[label]
            codec = self._codec(parameter, leg)
            rows.append(
                Measures(
                    name=label,
                    codec=None if codec is None else codec[1],
                    calls=totals.calls,
                    bits=8 * sent / elements if elements else 0.0,
                    raw_bytes=raw,
                    sent_bytes=sent,
                    error=totals.relative_error,
                    compared=totals.compared,
                    carried=totals.mean_carried,
                    not_finite=totals.not_finite,
                    too_large=totals.too_large,
                    codec_seconds=totals.nanos / 1e9,
                )
            )
        return rows

    def summary(self) -> str:
        """Returns `measures` as a table to print."""
        return table(self.measures())

    def explain(self) -> str:
        """Returns the choices of `codec="auto"` and their reasons, one line per parameter."""
        if self.compression.codec != AUTO:
            return f"codec={self.compression.codec!r}: nothing was chosen"
        if not self._choices:
            return f"nothing is chosen before the first gradients, at step {self.compression.start_step}"
        labels = [self._names[id(parameter)] + leg for parameter in self._parameters for leg in ("", REPLICAS)]
        return "\n".join(f"{label}: {self._choices[label].explain()}" for label in labels if label in self._choices)

    def rescale(self, factor: float) -> None:
        """Multiplies residuals by `factor`. If the loss scale changes, call it with the new scale divided by the old one.

        Raises:
            ValueError: the factor is not a positive number.
        """
        if not 0 < factor < math.inf:
            raise ValueError(
                f"factor is {factor!r}; expected a positive number: the new loss scale divided by the old one"
            )
        self._residual_store.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Returns the step, the decisions, and this rank's residuals.

        Each rank saves its own dict, or `torch.distributed.checkpoint` saves the dicts of all ranks.
        """
        return Saved(
            world=self.world,
            step=self.step,
            calls=self._calls,
            decided=self._decided,
            choices=self._choices,
            scale=self._scale,
            residuals=self._residual_store.contributions,
            residuals_of_sums=self._residual_store.sums,
            rank=self.rank,
        ).written()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continues from a `state_dict` of the same rank. If the world size differs, residuals are dropped with a warning.

        All ranks must load one, or none. At the next gradients they compare which rank each dict is from, and the steps.

        Raises:
            ValueError: the dict is of a version of torch_accl with another format.
        """
        read = Saved.read(saved, self.process_group.rank())
        self.step, self._calls = read.step, read.calls
        self._keep_figures(self._plans)
        self._residual_store = ResidualStore()
        self._decided, self._choices, self._scale, self._scale_read_at = read.decided, read.choices, read.scale, None
        self._checked = WeakSet()
        if read.world != self.world:
            self._loaded = replace(read, residuals={}, residuals_of_sums={}, rank=None, carried_at=None)
            if read.residuals:
                _warn_of_world(read.world, self.world)
            return
        self._loaded = replace(read, residuals={}, residuals_of_sums={})
        self._residual_store = ResidualStore(read.residuals, read.residuals_of_sums)

    def _portable(self) -> dict[str, Any]:
        past = dict(self._past)
        for plan in self._plans.values():
            _add_figures(past, plan)
        # The copy records whose residuals these are, because another rank may load it from a file.
        loaded = Saved(self.world, self.step, {}, {}, {}, None, rank=self.rank, carried_at=self.step)
        residuals, residuals_of_sums = self._residual_store.copies()
        parts = {name: part for name, part in super()._portable().items() if name != "_residual_store"}
        return {
            **parts,
            "traffic": replace(self.traffic),
            "scaler": None,
            "_names": [self._names[id(parameter)] for parameter in self._parameters],
            "_past": past,
            "_plans": {},
            "_residuals": residuals,
            "_residuals_of_sums": residuals_of_sums,
            "_checked": None,
            "_loaded": loaded if self._residual_store else None,
        }

    def _migrated(self, parts: dict[str, Any], version: int) -> dict[str, Any]:
        if version < 1:
            parts["_residuals"], parts["_residuals_of_sums"] = parts.pop("_losses"), parts.pop("_losses_of_sums")
        parts.setdefault("_keys", {})
        return parts

    def _restore(self, parts: Mapping[str, Any]) -> None:
        CompressionState.is_any_made = True
        super()._restore(parts)
        self._residual_store = ResidualStore(self.__dict__.pop("_residuals"), self.__dict__.pop("_residuals_of_sums"))
        # A copy has other parameter objects, so their ids are computed again.
        self._names = {id(parameter): name for parameter, name in zip(self._parameters, parts["_names"], strict=True)}
        self._checked = WeakSet()

    def _with_group(self, parts: Mapping[str, Any]) -> Self:
        made = super()._with_group(parts)
        made.scaler = self.scaler
        return made

    def _leave(self, before: int, now: int) -> None:
        if self._residual_store:
            _warn_of_world(before, now)
        self._keep_figures(self._plans)
        self._residual_store, self._loaded = ResidualStore(), None

    # ---- for hooks

    def name_of(self, parameter: torch.Tensor) -> str:
        """Returns the name of a parameter.

        Raises:
            RuntimeError: the model did not have the parameter when the state was created.
        """
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise RuntimeError(
                f"a gradient belongs to a parameter of shape {tuple(parameter.shape)} that the model did not have when its "
                "compression.CompressionState was created; create a new state after changing the model"
            ) from None

    def plan(
        self,
        parameters: Sequence[torch.Tensor],
        elements: Sequence[int],
        dtype: torch.dtype,
        step: int,
        contributions: Callable[[], Sequence[torch.Tensor]],
        group: dist.ProcessGroup,
        blocks: int = 1,
        leg: str = "",
    ) -> Plan:
        """Returns the plan by which gradients of these parameters are encoded.

        `elements` are the elements of each gradient in one of the call's `blocks`. `leg` is `REPLICAS` for shards between
        replicas, whose decisions, figures and residuals are separate.

        The first time, and then every `CHECK_EVERY` calls, ranks of the group agree on settings and decisions, which takes calls
        of its own. All ranks must therefore plan the same. With `codec="auto"`, the choice is based on `contributions`.
        """
        if group not in self._checked:
            check_settings(self.compression, group)
            check_progress(self._progress(step), group)
            self._checked.add(group)
        self.see_scale(step)
        key = (leg, dtype, blocks, *map(id, parameters), *elements)
        plan = self._plans.get(key)
        if plan is not None and plan.calls and plan.calls % CHECK_EVERY == 0 and self._is_changed_by_check(plan, group):
            self._keep_figures([key])
            plan = None
        # Gradients of zeros allow no choice. They are tried again only every `CHECK_EVERY` steps.
        is_due = step >= self.compression.start_step and (step - self.compression.start_step) % CHECK_EVERY == 0
        if is_due and self.compression.codec == AUTO and (plan is None or plan.is_waiting) and dtype in FLOATS:
            waiting = [self.name_of(parameter) + leg for parameter in parameters if self._awaits_choice(parameter, leg)]
            if waiting:
                labels = [self.name_of(parameter) + leg for parameter in parameters]
                gradients = dict(zip(labels, contributions(), strict=True))
                self._choices.update(choose(waiting, gradients, self.compression, group, self._times[leg]))
                self._keep_figures([key])
                plan = None
        if plan is None:
            plan = self._plans[key] = self._make_plan(parameters, elements, dtype, blocks, leg)
        plan.contributions = contributions
        return plan

    def send(
        self,
        plan: Plan,
        step: int,
        call: Callable[[Part, bool], Work | None],
        op: Op = dist.ReduceOp.AVG,
        ranks: int | None = None,
    ) -> list[Work]:
        """Issues the calls of a plan one after the other, without waiting for any, and adds them to the traffic.

        `call` issues the call of a part; its second argument is whether the part is encoded. Blocking calls have completed by
        then and return no Work. `op` combines the contributions of `ranks` ranks; None: of all ranks.
        """
        compression = self.compression
        # The plan does not keep the gradients, whose lifetime ends with the call.
        contributions, plan.contributions = plan.contributions, None
        gradients: Sequence[torch.Tensor] = ()
        if contributions is not None and compression.error_feedback and step >= compression.start_step:
            gradients = contributions() if plan.is_encoded or plan.unplaced_residuals else ()
            flush_residuals(plan, gradients, self._residual_store, op, ranks or self.world)
        is_encoded = plan.is_encoded and step >= compression.start_step
        plan.calls += is_encoded
        raw, sent = sum(plan.raw_bytes), sum(plan.sent_bytes)
        self.traffic.raw += raw
        self.traffic.sent += sent if is_encoded else raw
        one_in = compression.one_in(raw, sent) if sent else 0
        works = []
        for part in plan.parts:
            if is_encoded:
                given = gradients[part.tensors]
                placed = None if part.residuals is None else self._residual_store.of_call(part.residuals, given)
                try:
                    work = self._issue(part, placed, step, one_in, call)
                    if work is not None and placed:
                        # The callback keeps the residuals alive until the future completes, even if the state is released
                        # meanwhile. If results are copied to an accelerator, only these copies are left then, and they do not
                        # use residuals.
                        work.get_future().then(placed.let_go)
                except BaseException as error:
                    if placed:
                        placed.fail(error)
                    raise
            else:
                with exact():
                    work = call(part, False)
            if work is not None:
                works.append(work)
        return works

    def _issue(
        self, part: Part, placed: Placed | None, step: int, one_in: int, call: Callable[[Part, bool], Work | None]
    ) -> Work | None:
        """Issues an encoded call."""
        assert part.codecs is not None, "a plan that is encoded has codecs in all parts"
        addresses, on_device = (placed.addresses, placed.on_device) if placed else (None, None)
        with encoded(part.codecs, self.compression.seed, step, addresses, part.stats, one_in, on_device):
            work = call(part, True)
        if placed:
            placed.issued()
        return work

    def next_call(self, module: str) -> int:
        """Returns the number of a module's next call, from 0, and counts it."""
        call = self._calls.get(module, 0)
        self._calls[module] = call + 1
        self.step = max(self.step, call + 1)
        return call

    def see_scale(self, step: int) -> None:
        """Reads the gradient scaler's scale once per step, and rescales residuals if it changed."""
        if self.scaler is None or step == self._scale_read_at:
            return
        self._scale_read_at = step
        scale = float(self.scaler.get_scale())
        # With any other scale, gradients are zeros or not finite, and the scaler is about to change it.
        if 0 < scale < math.inf:
            if self._scale is not None and scale != self._scale:
                self.rescale(scale / self._scale)
            self._scale = scale

    def _progress(self, step: int) -> Progress:
        # An unpickled state determines its group, and its rank there, at its first gradients.
        rank, loaded = self.process_group.rank(), self._loaded
        if loaded is None:
            return Progress(rank, step)
        return Progress(rank, step, loaded.version, loaded.rank, loaded.carried_at)

    # ---- decisions

    def _key_of(self, name: str) -> str:
        return self._keys.get(name, name)

    def _codec(self, parameter: torch.Tensor, leg: str = "") -> Codec | None:
        name = self.name_of(parameter)
        if parameter.is_complex():
            return None
        if name + leg in self._decided:
            return self._decided[name + leg]
        codec = self.compression.codec_of(self._key_of(name), parameter.numel(), parameter.dim())
        if codec is None or codec[1] != AUTO:
            return codec
        choice = self._choices.get(name + leg)
        return None if choice is None or choice.codec == RAW else (codec[0], choice.codec, choice.codec)

    def _awaits_choice(self, parameter: torch.Tensor, leg: str) -> bool:
        name = self.name_of(parameter)
        if self.compression.codec != AUTO:
            return False
        codec = self.compression.codec_of(self._key_of(name), parameter.numel(), parameter.dim())
        return codec is not None and codec[1] == AUTO and name + leg not in self._choices

    def _is_changed_by_check(self, plan: Plan, group: dist.ProcessGroup) -> bool:
        """Checks the figures since the last check over all ranks, and changes codecs if needed. Returns whether it changed any."""
        limit = self.compression.error_limit
        if not plan.is_encoded or (limit is None and not self.compression.error_feedback):
            return False
        now = plan.totals()
        since = [new.plus(old, -1) for new, old in zip(now, plan.checked_totals, strict=True)]
        plan.checked_totals = now
        rows = [[row.error, row.square, row.carried, row.carried_calls] for row in since]
        changed = False
        for name, codec, sums in zip(plan.names, plan.chosen, reduced(rows, group), strict=True):
            error, square, carried, calls = sums
            if codec is None:
                continue
            if limit is not None and square and error > limit * square:
                self._decided[name] = None
                warnings.warn(
                    f"compression: the squared error of sums of {name} with {codec[1]} is {error / square:.2g} times "
                    f"their square, above error_limit {limit:.2g}: the parameter is sent uncompressed from now on",
                    stacklevel=4,
                )
                changed = True
            elif calls and carried > MOST_RESIDUAL * calls:
                intra_node, reduce, result = codec
                finer, finer_result = (facts(way).next_finer or RAW for way in (reduce, result))
                self._decided[name] = intra_node, finer, finer_result
                warnings.warn(
                    f"compression: the residual of {name} is {carried / calls:.3g} times its gradient (mean of "
                    f"{CHECK_EVERY} steps), because {reduce} loses more than it receives; the parameter uses {finer} "
                    "from now on",
                    stacklevel=4,
                )
                changed = True
        return changed

    def _keep_figures(self, keys: Iterable[tuple[object, ...]]) -> None:
        """Removes these plans and keeps their figures."""
        for plan in [self._plans.pop(key) for key in list(keys) if key in self._plans]:
            _add_figures(self._past, plan)

    # ---- plans

    def _make_plan(
        self, parameters: Sequence[torch.Tensor], elements: Sequence[int], dtype: torch.dtype, blocks: int, leg: str
    ) -> Plan:
        names = [self.name_of(parameter) + leg for parameter in parameters]
        chosen = [self._codec(parameter, leg) if dtype in FLOATS else None for parameter in parameters]
        ids = [tensor_id(self._key_of(self.name_of(parameter)) + leg) for parameter in parameters]
        plan = plan_of(names, chosen, ids, elements, dtype, blocks, self.compression.fusion_bytes)
        plan.is_waiting = any(self._awaits_choice(parameter, leg) for parameter in parameters)
        if not plan.is_encoded:
            plan.unplaced_residuals = self._unplaced_residuals(plan, elements, blocks)
            return plan
        for part in plan.parts:
            part.stats = _native.ErrorStats(len(names[part.tensors]))
            if self.compression.error_feedback:
                part.residuals = self._residuals_of(part, plan, elements, blocks)
        plan.unplaced_residuals = self._unplaced_residuals(plan, elements, blocks)
        plan.checked_totals = [Totals()] * len(names)
        return plan

    def _unplaced_residuals(self, plan: Plan, elements: Sequence[int], blocks: int) -> list[int]:
        """Returns the indices of tensors with residuals that their encodings no longer use.

        These are all residuals of tensors that are now sent unchanged, and residuals of sums whose encoding has become finer.
        """
        unplaced_residuals = []
        for place, (name, codec, count) in enumerate(zip(plan.names, plan.chosen, elements, strict=True)):
            is_kept = self._residual_store.check(name, blocks, count)
            if codec is None:
                unplaced_residuals += [place] * is_kept
            elif name in self._residual_store.sums and not _has_sum(codec, blocks):
                unplaced_residuals.append(place)
        return unplaced_residuals

    def _residuals_of(self, part: Part, plan: Plan, elements: Sequence[int], blocks: int) -> ResidualsOfCall:
        own = part.tensors
        tensors = zip(plan.names[own], plan.chosen[own], elements[own], strict=True)
        return ResidualsOfCall(
            tuple(
                TensorResiduals(name, count, _has_sum(codec, blocks)) if codec else TensorResiduals(None, count)
                for name, codec, count in tensors
            ),
            blocks,
        )


def _has_sum(codec: Codec, blocks: int) -> bool:
    """Whether a sum that is encoded by this codec has a residual of its own."""
    return blocks == 1 and facts(codec[2]).is_coarse


# Figures of a parameter: measurements, bytes of its compressed gradients before and after compression, and their elements.
_Figures = tuple[Totals, int, int, int]


def _add_figures(figures: dict[str, _Figures], plan: Plan) -> None:
    """Adds the figures of a plan's calls, by name. A tensor that is sent unchanged adds none."""
    for index, (name, codec, totals) in enumerate(zip(plan.names, plan.chosen, plan.totals(), strict=False)):
        sums, raw, sent, elements = figures.get(name, (Totals(), 0, 0, 0))
        if codec is not None:
            sums = sums.plus(totals)
            raw, sent = raw + totals.calls * plan.raw_bytes[index], sent + totals.calls * plan.sent_bytes[index]
            elements += totals.calls * (plan.raw_bytes[index] // plan.item_bytes)
        figures[name] = sums, raw, sent, elements


def _device_of_gradient(parameter: torch.Tensor) -> torch.device:
    """Returns the device on which a gradient is reduced: offloaded parameters of FSDP2 are on another one."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def _warn_of_world(before: int, now: int) -> None:
    warnings.warn(
        f"compression: residuals of {before} ranks cannot be distributed to {now} ranks: error feedback starts again "
        "from zero",
        stacklevel=3,
    )


_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter in the unwrapped model, by `id()`."""
    found = [(id(parameter), name.split(".")) for name, parameter in model.named_parameters()]
    plain = {identity: _without_wrappers(parts) for identity, parts in found}
    # If removing wrapper names makes two names equal, the model itself uses such a name. Then all names stay unchanged.
    return plain if len(set(plain.values())) == len(plain) else {identity: ".".join(parts) for identity, parts in found}


def _keys_of(model: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    """Returns keys for parameters that are tied to others, possibly on other ranks: the name that all of them have in common.

    A module declares tied parameters by a method `tied_names`, as `LayerParallel` does. Its names are relative to the module.
    """
    found = {}
    for module in model.modules():
        tied_names = getattr(module, "tied_names", None)
        for name, key in tied_names().items() if callable(tied_names) else ():
            own = names[id(module.get_parameter(name))]
            # If the module is a part of the model, its prefix goes before both names.
            short = _without_wrappers(name.split("."))
            found[own] = own.removesuffix(short) + _without_wrappers(key.split("."))
    return found


def _without_wrappers(parts: Sequence[str]) -> str:
    return ".".join(part for part in parts if part not in _WRAPPERS)
