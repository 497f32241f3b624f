"""Seeded contributions of every rank, and the expected results of their reductions.

Every rank can make every other rank's input, so each rank computes the expected result locally. For integers it uses
numpy, which wraps as the hardware does and knows the unsigned types. Floats are drawn so that the exact result is
representable in every order of summation. Where a test wants rounding, `bound` gives the maximum error.
"""

import functools

import numpy as np
import torch
import torch.distributed as dist

FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
REDUCED = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
# torch 2.13 has no bcomplex32.
MOVED = [*REDUCED, "complex32", *(["bcomplex32"] if hasattr(torch, "bcomplex32") else []), *FLOAT8]

OPS_OF_REALS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
OPS_OF_BITS = ["BAND", "BOR", "BXOR"]


def offered() -> list[tuple[str, str]]:
    """Every pair of operator and dtype that must reduce."""
    pairs = [(op, dtype) for dtype in FLOATS for op in OPS_OF_REALS]
    pairs += [(op, dtype) for dtype in COMPLEX for op in ("SUM", "AVG")]
    pairs += [(op, dtype) for dtype in ["bool", *INTEGERS] for op in ("SUM", "PRODUCT", "MIN", "MAX", *OPS_OF_BITS)]
    pairs += [("AVG", dtype) for dtype in INTEGERS]
    return pairs


def reduce_op(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, name)


def premul_sum(factor) -> dist.ReduceOp:
    """PREMUL_SUM with a number or a one-element tensor as factor."""
    return dist._make_nccl_premul_sum(factor)


def contribution(rank: int, shape, dtype: str, op: str = "SUM", seed: int = 0) -> torch.Tensor:
    """The input of `rank`: the same on every rank that computes it, different for every rank and seed."""
    kind = getattr(torch, dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    random = np.random.default_rng([seed, rank, *dtype.encode(), *op.encode()])
    if dtype == "bool":
        return torch.from_numpy(np.asarray(random.integers(0, 2, shape, dtype=np.uint8))).to(torch.bool)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return torch.from_numpy(np.asarray(random.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)))
    if dtype in FLOAT8:
        # Any bit pattern must arrive. NaNs are allowed too, since only bytes are compared.
        return torch.from_numpy(np.asarray(random.integers(0, 256, shape, dtype=np.uint8))).view(kind)
    if dtype == "bcomplex32":
        # torch cannot convert to bcomplex32.
        return (
            torch.from_numpy(np.asarray(random.integers(0, 256, (*shape, 4), dtype=np.uint8))).view(kind).reshape(shape)
        )
    if kind.is_complex:
        real, imaginary = (torch.from_numpy(np.asarray(_exact_floats(random, shape, op))) for _ in range(2))
        return torch.complex(real, imaginary).to(kind)
    return torch.from_numpy(np.asarray(_exact_floats(random, shape, op))).to(kind)


def _exact_floats(random, shape, op) -> np.ndarray:
    if op == "PRODUCT":
        # Powers of two, so that no product rounds.
        return random.choice(np.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]), shape)
    return random.integers(-16, 17, shape).astype(np.float64)


_NUMPY = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
# On bool the sum is "or" and the product is "and", as in torch.
_NUMPY_BOOL = {**_NUMPY, "SUM": np.logical_or, "PRODUCT": np.logical_and, "MIN": np.logical_and, "MAX": np.logical_or}


def expected_reduction(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of the ranks' tensors in rank order; exact for tensors of `contribution`."""
    dtype = tensors[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(expected_reduction([torch.view_as_real(t) for t in tensors], op))
    if dtype.is_floating_point:
        wide = [t.to(torch.float64) for t in tensors]
        if op == "AVG":
            # AVG divides in float32 for all narrower types, and rounds only after that.
            total = sum(wide[1:], wide[0]).to(torch.float64 if dtype == torch.float64 else torch.float32)
            return (total / len(tensors)).to(dtype)
        combine = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}[op]
        return functools.reduce(combine, wide).to(dtype)
    if op == "AVG":
        # The sum wraps as SUM does, and the quotient rounds towards zero as in NCCL. Python's own integers are exact.
        total = expected_reduction(tensors, "SUM").numpy()
        quotients = [abs(int(x)) // len(tensors) * (1 if x >= 0 else -1) for x in total.flat]
        return torch.from_numpy(np.asarray(quotients, dtype=total.dtype).reshape(total.shape))
    table = _NUMPY_BOOL if dtype == torch.bool else _NUMPY
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(functools.reduce(table[op], [t.numpy() for t in tensors])))


def bound(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest elementwise difference between a sum of these tensors in any order and the exact sum.

    Each of the n - 1 additions may round once to the type, by at most half an ulp of a partial sum. A partial sum is no
    larger than the sum of magnitudes. The factor 1 + n u covers the growth of the partial sums themselves.
    """
    n = len(tensors)
    unit = torch.finfo(tensors[0].dtype).eps / 2
    magnitude = sum(t.abs().to(torch.float64) for t in tensors)
    tiny = torch.finfo(tensors[0].dtype).smallest_normal * torch.finfo(tensors[0].dtype).eps
    return n * unit * (1 + n * unit) * magnitude + n * tiny


def bytes_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and bits are equal: NaN equals itself and -0.0 differs from 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    flat = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def contributions(world: int, shape, dtype: str, op: str = "SUM", seed: int = 0) -> list[torch.Tensor]:
    """The inputs of all ranks of a world, by rank."""
    return [contribution(rank, shape, dtype, op, seed) for rank in range(world)]


def noise(world: int, count: int, dtype: str, seed: int = 0) -> list[torch.Tensor]:
    """Normally distributed numbers of every rank, whose sums do round."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, generator=generator, dtype=torch.float64).to(getattr(torch, dtype)) for _ in range(world)
    ]
