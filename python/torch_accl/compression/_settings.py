"""Settings of compression, which all ranks of a group share: the tensors that are compressed, and their codecs."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache, wraps
from typing import Any

from .. import _native
from ._codecs import facts

__all__ = [
    "AUTO",
    "RAW",
    "Codec",
    "Compression",
    "default_codec",
    "fits",
    "tensor_id",
]

RAW = "raw"
AUTO = "auto"

# The codecs of one tensor: inside hosts, for parts of sums, for results.
Codec = tuple[str, str, str]


# The default audit: at most one element in `_ONE_IN`, and at most 1 / `_PART` of the bytes.
_ONE_IN = 1024
_PART = 250


# Version of the pickle format. Pickles of earlier formats have the old names of settings.
VERSION = 2

# Old names of settings. They are accepted for one release.
_OLD_NAMES = {"up": "reduce", "down": "result", "inner": "intra_node"}


class _Unsaid(str):
    """A default codec. It yields to the codec of a group's `Options`, unlike a codec that the caller has given."""

    __slots__ = ()


def _with_old_names(settings: type[Compression]) -> type[Compression]:
    """Makes the old names keyword arguments and attributes of the class. Each use causes a DeprecationWarning."""
    made: Any = settings.__init__
    default = {each.name: each.default for each in fields(settings)}

    @wraps(made)
    def init(self: Compression, *values: Any, **given: Any) -> None:
        for old in [name for name in _OLD_NAMES if name in given]:
            new, value = _OLD_NAMES[old], given.pop(old)
            named = dict(zip(default, values, strict=False), **given)
            # `dataclasses.replace` passes all settings, so a setting at its default counts as not given.
            if named.get(new, default[new]) != default[new]:
                raise ValueError(f"{old} is the old name of {new}; give one of them")
            warnings.warn(
                f"Compression({old}=...) is deprecated; use Compression({new}=...)", DeprecationWarning, stacklevel=2
            )
            given[new] = value
        made(self, *values, **given)

    settings.__init__ = init  # type: ignore[method-assign]
    for old, new in _OLD_NAMES.items():
        setattr(settings, old, _old_attribute(old, new))
    return settings


def _old_attribute(old: str, new: str) -> property:
    def value(self: Compression) -> Any:
        warnings.warn(f"Compression.{old} is deprecated; use Compression.{new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(value, doc=f"Old name of `{new}`.")


@_with_old_names
@dataclass(frozen=True)
class Compression:
    """How gradients are compressed.

    A codec is a text such as `bf16` or `maxmin:4,bucket=128,meta=float16,rounding=stochastic`: a name, bits if the codec has a
    choice of them, and settings. `accl codecs` lists all codecs, and `docs/codecs.md` says which to take. The elements of
    a `bucket` (default 512) share their metadata, whose type is `meta`. The default of `rounding` is `nearest` from 4 bits on
    and `stochastic` below. `correlated` is stochastic rounding whose errors balance between ranks.

    Attributes:
        codec: codec of all tensors without another rule. Default: the codec of the group's `Options`, else of `ACCL_CODEC`, else
            `maxmin:4`. With `"auto"` each parameter gets the fastest of raw, bf16, 8 and 4 bits whose error is within
            `error_budget`. The error is measured with the parameter's first compressed gradient, and the choice is kept. `"auto"`
            works with DistributedDataParallel and FSDP2; `CompressionState.explain` shows the choices.
        reduce: codec of parts of a sum, sent to the rank that adds them up; None takes `codec`.
        result: codec of results that are sent back; None takes `codec`.
        intra_node: codec of parts of a sum between ranks of one host, if an algorithm has a level per host.
        layers: codecs by parameter name, such as `{"embedding": "maxmin:8", "*.head.weight": "raw"}`. A key with `*`, `?` or `[` is
            a pattern for the whole name; any other key matches a part of the name. The last match wins.
            A match also overrides `exclude`, `one_dimensional` and `min_elements`.
        exclude: parameters that are sent unchanged, as names or patterns like the keys of `layers`.
        one_dimensional: whether parameters of one dimension (biases, norms) are compressed, too.
        min_elements: tensors with fewer elements are sent unchanged.
        error_feedback: whether the loss of an encoding is added to the next gradient (for DistributedDataParallel and FSDP2). It
            needs one float32 per element of a compressed parameter, two with 2 bits for results. It is worthwhile at 2 and 3 bits
            with `rounding=nearest`: stochastic rounding loses twice as much.
        error_budget: with `"auto"`, the maximum squared error of a sum divided by its square; above 0.05, 2 bits are tried too.
        error_limit: limit for the squared error of sums divided by their square, as the mean of 100 steps. A parameter above it is
            sent unchanged from then on, with a warning. None: errors are only reported (`CompressionState.measures`).
        audit: about one element in `audit` is also sent uncompressed, so that the error of sums is known; 0 means none. None: one
            in 1,024, or fewer if they would be more than 1/250 of the bytes (with 4 bits one in 1,940).
        start_step: number of initial steps that are sent uncompressed.
        seed: seed of random numbers, which also depend on step, tensor, rank and element.
        fusion_bytes: maximum bytes of gradients in one call; a positive multiple of 4. Gradients that a hook passes together are
            split into such calls, which are queued one after the other. A larger gradient is not cut and gets its own call. None:
            one call.

    `up`, `down` and `inner` are the old names of `reduce`, `result` and `intra_node`; each causes a DeprecationWarning.

    Raises:
        ValueError: a value is not accepted; the message lists the accepted ones. Also error feedback with a codec whose error is
            larger than the encoded value (`maxmin:1`), because residuals would grow without bound. Also a codec that is made for
            error feedback (`sign`, `topk`) without it, because it always loses a large part of a gradient. Also an old name
            together with the new one.
    """

    codec: str = field(default_factory=lambda: _Unsaid(default_codec()))
    reduce: str | None = None
    result: str | None = None
    intra_node: str = RAW
    layers: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    one_dimensional: bool = False
    min_elements: int = 1024
    error_feedback: bool = False
    error_budget: float = 0.05
    error_limit: float | None = None
    audit: int | None = None
    start_step: int = 0
    seed: int = 0
    fusion_bytes: int | None = None

    def __post_init__(self) -> None:
        canonical: dict[str, object] = {"intra_node": _checked("intra_node", self.intra_node)}
        canonical["codec"] = self.codec if self.codec == AUTO else _checked("codec", self.codec)
        if isinstance(self.codec, _Unsaid):
            canonical["codec"] = _Unsaid(canonical["codec"])
        canonical |= {
            name: _checked(name, codec) for name in ("reduce", "result") if (codec := getattr(self, name)) is not None
        }
        canonical["layers"] = {key: _checked(f"layers[{key!r}]", codec) for key, codec in self.layers.items()}
        canonical["exclude"] = _patterns(self.exclude)
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        for name in ("min_elements", "start_step"):
            _check_count(name, getattr(self, name))
        if self.audit is not None:
            _check_count("audit", self.audit)
        bound = self.fusion_bytes
        if bound is not None and (type(bound) is not int or bound <= 0 or bound % 4):
            raise ValueError(
                f"fusion_bytes is {bound!r}; expected None or a positive multiple of 4, in bytes of gradients"
            )
        _check_positive("error_budget", self.error_budget)
        if self.error_limit is not None:
            _check_positive("error_limit", self.error_limit)
            if self.audit == 0:
                raise ValueError("error_limit: the error of sums is not known with audit=0; omit one of them")
        if self.codec == AUTO and (self.reduce, self.result) != (None, None):
            raise ValueError('codec="auto" chooses codecs for both directions; omit reduce and result')
        for name in ("one_dimensional", "error_feedback"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed!r}; expected an integer from 0 to 2^64 - 1")

        given = (self.codec, self.reduce, self.result, *self.layers.values())
        codecs = [facts(codec) for codec in given if codec not in (None, AUTO)]
        for codec in codecs:
            if self.error_feedback and codec.is_divergent:
                finer = codec.next_finer or RAW
                raise ValueError(
                    f"error_feedback: with {codec.short} it diverges, because the loss is larger than the encoded "
                    f"value; use {facts(finer).short} or a finer codec"
                )
        lossy = [codec.text for codec in (*codecs, facts(self.intra_node)) if codec.needs_feedback]
        if lossy and not self.error_feedback:
            raise ValueError(
                f"{lossy[0]} loses a large part of a gradient, always in the same way: set error_feedback=True, which "
                "adds the loss to the next gradient, or use another codec"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"version": VERSION, **self.__dict__}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        # Pickles of the first format have no version. Their fields are the same as in version 1.
        if (version := saved.get("version", 0)) > VERSION:
            raise ValueError(
                f"compression: the settings were saved in version {version}; this version of torch_accl supports up to "
                f"{VERSION}"
            )
        self.__dict__.update((_OLD_NAMES.get(name, name), value) for name, value in saved.items() if name != "version")
        try:
            self.__post_init__()
        except ValueError as error:
            raise ValueError(f"compression: saved settings are not accepted: {error}") from None

    def of_group(self, codec: str | None) -> Compression:
        """Returns these settings for a group whose `Options` name `codec` (or None), which replaces a default codec."""
        return self if codec is None or not isinstance(self.codec, _Unsaid) else replace(self, codec=codec)

    def codecs(self) -> list[str]:
        """Returns all codecs that any parameter may get, without `"auto"`."""
        codecs = [self.reduce or self.codec, self.result or self.codec, *self.layers.values()]
        return list(dict.fromkeys(codec for codec in codecs if codec != AUTO))

    def codec_of(self, name: str, elements: int, dimensions: int) -> Codec | None:
        """Returns the codecs of a parameter; None if it is sent unchanged."""
        chosen = [codec for key, codec in self.layers.items() if fits(key, name)]
        if chosen:
            return None if chosen[-1] == RAW else (self.intra_node, chosen[-1], chosen[-1])
        if any(fits(pattern, name) for pattern in self.exclude):
            return None
        if elements < self.min_elements or (dimensions < 2 and not self.one_dimensional):
            return None
        return self.default

    def one_in(self, raw_bytes: int, sent_bytes: int) -> int:
        """Returns N for auditing one element in N, in a call that sends `sent_bytes` instead of `raw_bytes`; 0 means none."""
        return max(_ONE_IN, -(-_PART * raw_bytes // sent_bytes)) if self.audit is None else self.audit

    @property
    def default(self) -> Codec | None:
        """The codecs of a tensor without a rule; None if it is sent unchanged."""
        codecs = (self.intra_node, self.reduce or self.codec, self.result or self.codec)
        return None if codecs[1:] == (RAW, RAW) else codecs

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Returns the keys of `layers` and `exclude` that match none of these parameters."""
        known = list(names)
        return [key for key in (*self.layers, *self.exclude) if not any(fits(key, name) for name in known)]


def default_codec() -> str:
    """Returns the codec to use if the caller gives none: `ACCL_CODEC` or its default."""
    return _default_codec(os.environ.get("ACCL_CODEC"))


@lru_cache(maxsize=16)
def _default_codec(_said: str | None) -> str:
    # Building the table reads all variables, which takes longer than a small call. The result is cached by the variable's value.
    return next(row["value"] for row in _native.config_rows() if row["option"] == "compression")


def fits(pattern: str, name: str) -> bool:
    """Whether a key of `layers` or `exclude` matches a parameter name."""
    return fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name


def tensor_id(name: str) -> int:
    """Returns a number for a name, the same on all ranks. It makes the random numbers of one tensor differ from all others."""
    return zlib.crc32(name.encode())


def _checked(name: str, codec: object) -> str:
    if not isinstance(codec, str):
        raise ValueError(f"{name} is {codec!r}; expected a codec such as 'maxmin:4'")
    try:
        return _native.check_codec(codec)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _patterns(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"exclude is {given!r}; expected a list of names or patterns")
    patterns = tuple(given)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"exclude is {given!r}; expected a list of names or patterns")
    return patterns


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} is {value!r}; expected a number above 0")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; expected a number of at least 0")
