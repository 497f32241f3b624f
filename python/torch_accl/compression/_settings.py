"""Which tensors are compressed, and how: settings that all ranks of a group share."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
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

# The codecs of one tensor: inside hosts, of parts of sums, of results.
Codec = tuple[str, str, str]


# The audit where none is given: of elements, and most of the bytes.
_ONE_IN = 1024
_PART = 250


# Of what is pickled.
VERSION = 1


class _Unsaid(str):
    """A codec that nobody has given: a group may have another one that is meant."""

    __slots__ = ()


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed.

    A codec is a text such as `bf16` or `maxmin:4,bucket=128,meta=float16,rounding=stochastic`: a name, with bits where there is a
    choice of them, and settings. `accl codecs` lists all, and `docs/compression.md` says which to take. Elements of a `bucket`
    (512, where it is left out) share their metadata, whose type is `meta`; `rounding` is `nearest` from 4 bits on and `stochastic`
    below, unless it is given; `correlated` is stochastic with errors that balance between ranks.

    Attributes:
        codec: of all tensors that are not treated otherwise. Where it is left out, that of the group's `Options`, else that of
            `ACCL_CODEC`, else `maxmin:4`. With `"auto"` each parameter gets the fastest one of raw, bf16, 8 and 4 bits whose error is
            within `error_budget`, which is measured with its first compressed gradient and kept (for DistributedDataParallel and
            FSDP2; `CompressionState.explain` tells).
        up: of parts of a sum on their way to who adds them up; None takes `codec`.
        down: of results on their way back; None takes `codec`.
        inner: of parts of a sum between ranks of one host, where an algorithm composes over hosts.
        layers: codecs by name of parameter, such as `{"embedding": "maxmin:8", "*.head.weight": "raw"}`. A key with `*`, `?` or
            `[` is a pattern for the whole name, any other is part of the name; the last that fits wins.
        exclude: parameters that travel as they are, given as the keys of `layers` are.
        one_dimensional: whether parameters of one dimension (biases, norms) are compressed, too.
        min_elements: tensors with fewer travel as they are.
        error_feedback: whether what an encoding loses of a gradient is added to the next one (for DistributedDataParallel and
            FSDP2; it takes a float32 for each element of a compressed parameter, two with 2 bits on the way back). Worth it
            at 2 and 3 bits, with `rounding=nearest`: stochastic rounding loses twice as much.
        error_budget: with `"auto"`, most that the squared error of a sum by its square may be; beyond 0.05, 2 bits are tried too.
        error_limit: squared error of sums by their square, mean of 100 steps, beyond which a parameter travels as it is from then
            on, with a warning; None: it is only reported (`CompressionState.measures`).
        audit: about one element in so many travels uncompressed, too, so that the error of sums is known; 0: none; None: one in
            1,024, and fewer where they would be more than 1/250 of the bytes (with 4 bits one in 1,940).
        start_step: steps that go uncompressed first.
        seed: what random numbers are made from, together with step, tensor, rank and element.
        fusion_bytes: gradients that a hook hands over together travel in calls of at most so many bytes of gradients, one queued
            after the other (a positive multiple of 4). A larger one has a call of its own: none is cut. None: in one call.

    Raises:
        ValueError: a codec has no such setting; the message says what is accepted. Or error feedback was asked for with a codec
            whose error is larger than what it encodes (`maxmin:1`), so that the residual grows without end. Or it was not asked for
            with one that is made for it (`sign`, `topk`), and that always loses a large part of a gradient.
    """

    codec: str = field(default_factory=lambda: _Unsaid(default_codec()))
    up: str | None = None
    down: str | None = None
    inner: str = RAW
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
        canonical: dict[str, object] = {"inner": _checked("inner", self.inner)}
        canonical["codec"] = self.codec if self.codec == AUTO else _checked("codec", self.codec)
        if isinstance(self.codec, _Unsaid):
            canonical["codec"] = _Unsaid(canonical["codec"])
        canonical |= {
            name: _checked(name, codec) for name in ("up", "down") if (codec := getattr(self, name)) is not None
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
                raise ValueError("error_limit: the error of sums is not known with audit=0; leave it out")
        if self.codec == AUTO and (self.up, self.down) != (None, None):
            raise ValueError('codec="auto" chooses codecs of both ways: leave up and down out')
        for name in ("one_dimensional", "error_feedback"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed!r}; expected an integer from 0 to 2^64 - 1")

        given = (self.codec, self.up, self.down, *self.layers.values())
        codecs = [facts(codec) for codec in given if codec not in (None, AUTO)]
        for codec in codecs:
            if self.error_feedback and codec.is_divergent:
                finer = codec.next_finer or RAW
                raise ValueError(
                    f"error_feedback: with {codec.short} it diverges, since an encoding loses more than there was; take "
                    f"{facts(finer).short} or a finer one"
                )
        lossy = [codec.text for codec in (*codecs, facts(self.inner)) if codec.needs_feedback]
        if lossy and not self.error_feedback:
            raise ValueError(
                f"{lossy[0]} loses a large part of a gradient, always in the same way: give error_feedback=True, which adds what was "
                "lost to the next one, or take another codec"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"version": VERSION, **self.__dict__}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        # The first had no number, and the same fields.
        if (version := saved.get("version", 0)) > VERSION:
            raise ValueError(
                f"compression: the settings were saved in version {version}; this version of torch_accl knows up to {VERSION}"
            )
        self.__dict__.update((name, value) for name, value in saved.items() if name != "version")
        try:
            self.__post_init__()
        except ValueError as error:
            raise ValueError(f"compression: settings that were saved are not accepted: {error}") from None

    def of_group(self, codec: str | None) -> Compression:
        """These settings in a group whose `Options` name a codec, or none: it is meant where none was given here."""
        return self if codec is None or not isinstance(self.codec, _Unsaid) else replace(self, codec=codec)

    def codecs(self) -> list[str]:
        """All that some parameter may take."""
        codecs = [self.up or self.codec, self.down or self.codec, *self.layers.values()]
        return list(dict.fromkeys(codec for codec in codecs if codec != AUTO))

    def codec_of(self, name: str, elements: int, dimensions: int) -> Codec | None:
        """The codecs of a parameter; None if it travels as it is."""
        chosen = [codec for key, codec in self.layers.items() if fits(key, name)]
        if chosen:
            return None if chosen[-1] == RAW else (self.inner, chosen[-1], chosen[-1])
        if any(fits(pattern, name) for pattern in self.exclude):
            return None
        if elements < self.min_elements or (dimensions < 2 and not self.one_dimensional):
            return None
        return self.default

    def one_in(self, raw_bytes: int, sent_bytes: int) -> int:
        """The audit of a call that sends so many bytes in place of so many."""
        return max(_ONE_IN, -(-_PART * raw_bytes // sent_bytes)) if self.audit is None else self.audit

    @property
    def default(self) -> Codec | None:
        """The codecs of a tensor that no rule is for; None if it travels as it is."""
        codecs = (self.inner, self.up or self.codec, self.down or self.codec)
        return None if codecs[1:] == (RAW, RAW) else codecs

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The keys of `layers` and `exclude` that fit none of these parameters."""
        known = list(names)
        return [key for key in (*self.layers, *self.exclude) if not any(fits(key, name) for name in known)]


def default_codec() -> str:
    """The codec that is meant where none is given."""
    return _default_codec(os.environ.get("ACCL_CODEC"))


@lru_cache(maxsize=16)
def _default_codec(_said: str | None) -> str:
    # The table reads all variables, which takes longer than a small call: what this one says is kept.
    return next(row["value"] for row in _native.config_rows() if row["option"] == "compression")


def fits(pattern: str, name: str) -> bool:
    """Whether a key of `layers` or `exclude` is for a parameter."""
    return fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name


def tensor_id(name: str) -> int:
    """A number for a name, the same on all ranks: it tells the random numbers of one tensor from those of others."""
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
