"""The environment variables of CGX: their meaning, and the warnings for those without effect here.

Owns their names, meanings and checks. `_cgx_group.py` and `_cgx_hook.py` decide what is compressed with them. CGX read
an invalid value as 0; here it is a `ValueError` that names the variable. A variable with an empty value counts as not
set.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from dataclasses import dataclass
from functools import lru_cache

from .. import _native
from ._cgx_agreement import Said

__all__ = [
    "BITS",
    "BUCKET_SIZE",
    "DEFAULT_BUCKET_SIZE",
    "INNER_REDUCTION",
    "MINIMAL_SIZE",
    "MOST_BITS",
    "RAW_FROM_BITS",
    "SKIP_INCOMPLETE",
    "CallSettings",
    "GroupSettings",
    "check_bucket_size",
    "codec_text",
    "variables",
    "warn_of_what_differs",
]

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
BUCKET_SIZE = "CGX_COMPRESSION_BUCKET_SIZE"
SKIP_INCOMPLETE = "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS"
MINIMAL_SIZE = "CGX_COMPRESSION_MINIMAL_SIZE"
FAKE_RATIO = "CGX_COMPRESSION_FAKE_RATIO"
FUSION_BUFFER = "CGX_FUSION_BUFFER_SIZE_MB"
INNER_COMMUNICATOR = "CGX_INNER_COMMUNICATOR_TYPE"
CROSS_COMMUNICATOR = "CGX_CROSS_COMMUNICATOR_TYPE"
INNER_REDUCTION = "CGX_INNER_REDUCTION_TYPE"
CROSS_REDUCTION = "CGX_CROSS_REDUCTION_TYPE"
INTRA_BROADCAST = "CGX_INTRA_BROADCAST"
INTRA_COMPRESS = "CGX_INTRA_COMPRESS"
REMOTE_BUFFERS = "CGX_REMOTE_BUF_COMPRESSION"
ALL_TO_ALL = "CGX_DEBUG_ALL_TO_ALL_REDUCTION"
DUMMY = "CGX_DEBUG_DUMMY_COMPRESSION"
OLD_COMMUNICATOR = "COMMUNICATOR_TYPE"

# Variables of CGX's build, which may still be in the environment.
BUILD_SWITCHES = ("CGX_CUDA",)

# From this many bits per element, a tensor is sent uncompressed.
RAW_FROM_BITS = 9
MOST_BITS = 32
DEFAULT_BUCKET_SIZE = 512
DEFAULT_MINIMAL_SIZE = 16
DEFAULT_FUSION_MIB = 64
LEAST_FUSION_BYTES = 2048


@dataclass(frozen=True)
class CallSettings:
    """Settings that are read before every call.

    Attributes:
        bits: bits per element of layers without their own; from `RAW_FROM_BITS` on they are sent uncompressed.
        bucket_size: elements that share a minimum and a step; None if no variable gives it.
        skip_incomplete: whether elements behind the last full bucket of a slice are sent uncompressed.
    """

    bits: int
    bucket_size: int | None
    skip_incomplete: bool

    @staticmethod
    def now() -> CallSettings:
        """Reads the settings from the environment.

        Raises:
            ValueError: a variable has an invalid value.
        """
        return _call_settings(_text(BITS), _text(BUCKET_SIZE), _text(SKIP_INCOMPLETE))


@lru_cache(maxsize=64)
def _call_settings(bits: str | None, bucket_size: str | None, skip_incomplete: str | None) -> CallSettings:
    wanted = "a number of bits from 1 to 32, where 9 and more mean uncompressed"
    size = None if bucket_size is None else _integer(BUCKET_SIZE, bucket_size, 1, None, "a number of elements")
    if size is not None:
        check_bucket_size(BUCKET_SIZE, size)
    return CallSettings(
        MOST_BITS if bits is None else _integer(BITS, bits, 1, MOST_BITS, wanted),
        size,
        skip_incomplete is not None and _integer(SKIP_INCOMPLETE, skip_incomplete, None, None, "0 or 1") > 0,
    )


@dataclass(frozen=True)
class GroupSettings:
    """Settings that are read once, when a group is created.

    Attributes:
        minimal_size: a layer is compressed only if it has more elements.
        inside_hosts: whether traffic between ranks of one host is compressed.
        is_dummy: whether nothing is compressed at all.
        algorithm: the value for `ACCL_ALGORITHM` unless that is given; None leaves the choice to the engine.
        fusion_bytes: maximum bytes of layers that are sent in one call; a larger layer has its own call.
    """

    minimal_size: int = DEFAULT_MINIMAL_SIZE
    inside_hosts: bool = True
    is_dummy: bool = False
    algorithm: str | None = None
    fusion_bytes: int = DEFAULT_FUSION_MIB << 20

    @staticmethod
    def now() -> GroupSettings:
        """Reads the settings from the environment, and checks all variables of CGX.

        Raises:
            ValueError: a variable has an invalid value.
        """
        CallSettings.now()
        inner = _one_of(INNER_REDUCTION, ("SRA", "Ring"))
        _one_of(CROSS_REDUCTION, ("SRA", "Ring"))
        _one_of(INNER_COMMUNICATOR, ("MPI", "SHM", "NCCL"))
        _one_of(CROSS_COMMUNICATOR, ("MPI", "SHM", "NCCL"))
        _one_of(OLD_COMMUNICATOR, ("MPI", "SHM", "NCCL", "P2P"))
        fusion_mib = _optional(FUSION_BUFFER, 0, "a size in MiB")
        for name in (INTRA_BROADCAST, REMOTE_BUFFERS, ALL_TO_ALL):
            _switch(name, False)
        _ratio()
        minimal_size = _optional(MINIMAL_SIZE, 0, "a number of elements")
        return GroupSettings(
            minimal_size=DEFAULT_MINIMAL_SIZE if minimal_size is None else minimal_size,
            inside_hosts=_switch(INTRA_COMPRESS, True),
            is_dummy=_switch(DUMMY, False),
            algorithm="all_reduce=ring" if inner == "Ring" else None,
            fusion_bytes=max((DEFAULT_FUSION_MIB if fusion_mib is None else fusion_mib) << 20, LEAST_FUSION_BYTES),
        )

    def said(self) -> dict[str, Said]:
        """Returns the settings by name, each with the variable and value that give it, in the variable's unit."""
        values = {
            "minimal_size": (MINIMAL_SIZE, self.minimal_size),
            "inside_hosts": (INTRA_COMPRESS, int(self.inside_hosts)),
            "is_dummy": (DUMMY, int(self.is_dummy)),
            "algorithm": (INNER_REDUCTION, "SRA" if self.algorithm is None else "Ring"),
            "fusion_bytes": (FUSION_BUFFER, self.fusion_bytes >> 20),
        }
        return {name: Said(str(value), f"{variable}={value}") for name, (variable, value) in values.items()}


def warn_of_what_differs() -> None:
    """Warns of variables that have no effect, or another effect than in CGX: one warning for each cause."""
    idle = {
        INNER_COMMUNICATOR: _text(INNER_COMMUNICATOR) not in (None, "SHM"),
        OLD_COMMUNICATOR: _text(OLD_COMMUNICATOR) not in (None, "SHM"),
        CROSS_COMMUNICATOR: _text(CROSS_COMMUNICATOR) is not None,
        INTRA_BROADCAST: _text(INTRA_BROADCAST) is not None,
        CROSS_REDUCTION: _text(CROSS_REDUCTION) is not None,
        REMOTE_BUFFERS: _switch(REMOTE_BUFFERS, False),
    }
    if named := [f"{name}={_text(name)}" for name, is_idle in idle.items() if is_idle]:
        _warn(
            f"{', '.join(named)} {'has' if len(named) == 1 else 'have'} no effect here: ranks on a host use shared "
            "memory, and hosts are connected by TCP (ACCL_TRANSPORTS). Algorithms are chosen by size "
            "(ACCL_ALGORITHM), and each tile is sent as soon as it is encoded"
        )
    if _ratio() < 1:
        _warn(
            f"{FAKE_RATIO}={_text(FAKE_RATIO)} is ignored: CGX left gradients unreduced to measure time, with wrong "
            "results on purpose"
        )
    if _switch(ALL_TO_ALL, False):
        _warn(
            f"{ALL_TO_ALL}={_text(ALL_TO_ALL)} is ignored; ACCL_ALGORITHM=all_reduce=direct exchanges the same messages, with the "
            "same result on all ranks"
        )
    if _switch(DUMMY, False):
        _warn(f"{DUMMY}={_text(DUMMY)}: nothing is compressed, as with CGX; unset it to compress")
    known = [value for key, value in globals().items() if key.isupper() and isinstance(value, str)]
    for name in sorted(set(variables()) - set(known) - set(BUILD_SWITCHES)):
        nearest = difflib.get_close_matches(name, known, 1)
        _warn(
            f"{name} is not a variable of CGX and has no effect" + (f"; did you mean {nearest[0]}?" if nearest else "")
        )


def variables() -> list[str]:
    """The variables in the environment that have CGX's prefix and are set to something."""
    return sorted(name for name, value in os.environ.items() if name.startswith("CGX_") and value.strip())


def check_bucket_size(name: str, size: object) -> int:
    """Checks that the codec accepts a bucket size, and returns it.

    Raises:
        ValueError: the codec does not accept it; the message calls it `name`.
    """
    if type(size) is not int:
        raise ValueError(f"{name} is {size!r}; expected a number of elements")
    try:
        _native.check_codec(f"maxmin:8,bucket={size}")
    except ValueError as error:
        # The codec's message names the parameter in its own terms, so keep only the part that says what is accepted.
        reason = str(error).split("expected", 1)
        raise ValueError(f"{name} is {size}; expected{reason[1]}" if len(reason) == 2 else f"{name}: {error}") from None
    return size


def codec_text(bits: int, bucket_size: int, dtype: str, skip_incomplete: bool) -> str:
    """Returns the text of CGX's codec: rounding to the nearest level, with metadata of the elements' type."""
    text = f"maxmin:{bits},bucket={bucket_size},meta={dtype},rounding=nearest"
    return f"{text},skip_incomplete" if skip_incomplete else text


def _text(name: str) -> str | None:
    value = os.environ.get(name, "").strip()
    return value or None


def _integer(name: str, text: str, least: int | None, most: int | None, wanted: str) -> int:
    value = int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else None
    if value is None or (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} is {text!r}; expected {wanted}")
    return value


def _optional(name: str, least: int, wanted: str) -> int | None:
    text = _text(name)
    return None if text is None else _integer(name, text, least, None, f"{wanted}, at least {least}")


def _switch(name: str, default: bool) -> bool:
    text = _text(name)
    return default if text is None else _integer(name, text, None, None, "0 or 1") != 0


def _one_of(name: str, accepted: tuple[str, ...]) -> str | None:
    text = _text(name)
    if text is not None and text not in accepted:
        raise ValueError(f"{name} is {text!r}; expected one of {', '.join(accepted)}")
    return text


def _ratio() -> float:
    text = _text(FAKE_RATIO)
    try:
        ratio = 1.0 if text is None else float(text)
    except ValueError:
        ratio = -1.0
    if not ratio >= 0:
        raise ValueError(f"{FAKE_RATIO} is {text!r}; expected a number of at least 0, such as 0.5")
    return ratio


def _warn(text: str) -> None:
    warnings.warn(f"cgx: {text}", stacklevel=2)
