"""Type stub of the native module.

A `TypedDict` class lists the keys of a row. The module does not contain it: the name is for annotations only.
"""

from collections.abc import Callable
from datetime import timedelta
from os import PathLike
from typing import Any, TypedDict

from torch import Tensor
from torch import device as _device
from torch._C._distributed_c10d import Backend as _TorchBackend
from torch._C._distributed_c10d import ReduceOp, Store

class _BuiltFor(TypedDict):
    version: str
    torch: str
    cxx11_abi: bool
    pybind11: str

class _ConfigRow(TypedDict):
    name: str
    option: str
    scope: str
    agreed: bool
    value: str
    default: str
    accepted: str
    effect: str

class _AlgorithmRow(TypedDict):
    collective: str
    name: str
    steps: str
    bytes: str
    requires: str
    wins: str
    source: str

class _DtypeRow(TypedDict):
    name: str
    bytes: int
    ops: list[str]

class _HostFacts(TypedDict):
    hostname: str
    host_id: str
    instruction_set: str
    transports: list[str]
    addresses: list[str]

class _CodecRow(TypedDict):
    name: str
    spelled: str
    description: str
    settings: list[str]
    bits: tuple[int, int] | None
    buckets: str | None
    needs_feedback: bool
    auto: list[str]

class _CodecFacts(TypedDict):
    text: str
    name: str
    is_exact: bool
    is_coarse: bool
    is_divergent: bool
    is_cast: bool
    needs_feedback: bool
    hides_magnitudes: bool
    next_finer: str | None

class BackendOptions(_TorchBackend.Options):
    """Options of a backend: torch's own, plus settings whose names are the arguments of `torch_accl.Options`."""

    settings: dict[str, str]
    def __init__(self) -> None: ...
    def __copy__(self) -> BackendOptions: ...
    def __deepcopy__(self, memo: dict[int, Any], /) -> BackendOptions: ...

class Backend(_TorchBackend):
    """The backend of one rank in one group, as `group._get_backend(device)` returns it."""

    @property
    def options(self) -> BackendOptions: ...
    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Does the same as `set_timeout`, under the name that gloo's backend uses."""

    def perform_nocolor_split(self, device: _device) -> None:
        """Does nothing. torch calls it on ranks that are not in a new group, if the default group has a device."""

    def describe(self) -> str:
        """Returns facts about the group, one per line."""

    def snapshot(self) -> dict[str, Any]:
        """Returns the group's state and counters; `docs/groups.md` lists the fields. It only costs the time to write them.

        `group`: calls issued and failed, bytes, waits, and calls in flight with the ranks that they wait for. `ranks`: for
        each rank its process, its link, and what was sent to it. `process`: cost of progress in all groups of the process.
        After the group was destroyed `group` is None.
        """

    def first_error(self) -> str:
        """Returns the message of the first error that made the group unusable, or an empty string."""

    def algorithm_of(
        self,
        collective: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        op: ReduceOp | ReduceOp.RedOpType,
        root: int,
    ) -> str:
        """Returns the algorithm that a call would use in this group. Issues no call. All ranks get the same answer.

        A call is described by its blocks, one tensor per block. Calls that are in place in torch (all_reduce, reduce,
        broadcast) have one tensor in `outputs`. `inputs` has one tensor per rank for reduce_scatter, all_to_all and the root
        of scatter. `outputs` has one tensor per rank for all_gather, all_to_all and the root of gather.
        """

    def time_calls(
        self,
        collective: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        op: ReduceOp | ReduceOp.RedOpType,
        root: int,
        samples: int,
        calls: int,
        fenced: bool,
    ) -> list[int]:
        """Issues `samples` times `calls` blocking calls below torch, without the interpreter. Returns nanoseconds per sample.

        Intended for benchmarks. The calls use the same code path as every blocking call, and all ranks must issue the same
        calls. `fenced` runs a barrier before each sample; the barrier is not timed.
        """

class LayerPlan:
    """Operations of all ranks in a layer-parallel solve or pipeline. Each operation is a tuple that starts with its name."""

    @staticmethod
    def mgrit(
        layers: list[tuple[str, bool]],
        factors: list[int],
        counts: list[int],
        pass_: str,
        cycle: tuple[int, str, list[int], str, str, bool, str],
        is_coarser: list[bool] = ...,
    ) -> LayerPlan: ...
    @staticmethod
    def pipeline(layers: list[tuple[str, bool]], counts: list[int], schedule: str, micro_batches: int) -> LayerPlan: ...
    def ops(self, rank: int) -> list[tuple[Any, ...]]: ...
    def counts(self, rank: int) -> dict[str, int]: ...
    @property
    def points(self) -> list[int]: ...
    @property
    def meshes(self) -> list[int]: ...
    @property
    def inputs(self) -> list[tuple[int, int]]: ...
    @property
    def guesses(self) -> list[tuple[int, int]]: ...
    @property
    def outputs(self) -> list[tuple[int, int]]: ...
    @property
    def states(self) -> list[tuple[int, int]]: ...
    @property
    def norms(self) -> list[int]: ...
    @property
    def intervals(self) -> int: ...
    def memory(self, rank: int, state: list[int], graph: list[int], shares: list[int] = ...) -> tuple[int, int]: ...
    def simulate(
        self,
        layers: list[tuple[int, int, int, int]],
        state: list[int],
        rates: tuple[int, int, int, int, int],
        shares: list[tuple[int, int]] = ...,
    ) -> tuple[int, list[list[tuple[int, int, int]]]]: ...

def layer_placement(layers: list[tuple[str, bool]], factors: list[int], ranks: int, how: str) -> list[int]: ...
def layer_levels(layers: list[tuple[str, bool]], factors: list[int]) -> list[list[int]]: ...

class Runtime:
    """The engine of this process. A process creates only one."""

    def __init__(self) -> None: ...
    def create_backend(self, store: Store, rank: int, size: int, options: BackendOptions, is_default: bool) -> Backend:
        """Creates a backend. Collective over all ranks: blocks until they are connected or the timeout has passed.

        `is_default`: whether the backend belongs to the default process group, which uses the device. The value must be the
        same on all ranks.
        """

    def shutdown(self, await_calls: bool = False) -> None:
        """Disconnects from all peers and stops the threads. Takes bounded time, raises nothing, and may be called repeatedly.

        `await_calls`: whether calls in flight get time to complete first.
        """

def built_for() -> _BuiltFor:
    """Returns what the module was built for: `version` of this package, `torch` by its headers, `cxx11_abi`, `pybind11`."""

def config_rows() -> list[_ConfigRow]:
    """Returns the rows of the configuration table, with the values that the environment sets."""

def algorithms() -> list[_AlgorithmRow]:
    """Returns the rows of the table of algorithms."""

def dtypes() -> list[_DtypeRow]:
    """Returns the element types that can be sent: `name` as in torch, `bytes` per element, `ops` that can reduce them."""

def host_facts() -> _HostFacts:
    """Returns what this process would offer its peers: host name and identity, instruction set, transports, addresses."""

def simulate(
    collective: str,
    sizes: list[int],
    world: tuple[int, int, int],
    link: tuple[int, int] | None,
    machine_file: str | None,
) -> list[dict[str, Any]]:
    """Returns a row for each size: `bytes`, the algorithm `chosen`, and `times_us`, the predicted microseconds by algorithm.

    `world` is (ranks, ranks per host, cores per host). `link` is (picoseconds per KiB, latency in picoseconds) of a host's
    network connection; None takes the measured constants. `machine_file` replaces the constants of this machine.

    Raises ValueError if `world` is invalid or the file contains no constants.
    """

def calibration(again: bool) -> dict[str, Any]:
    """Returns the cost model's `constants` for this machine, their `source`, and `age_s`, their age in seconds or None.

    `at_bounds` lists the constants that the measurement does not determine. If `again` is set, measures again.
    """

def check_option(option: str, value: str) -> None:
    """Raises ValueError for an unknown option or a value that is not accepted."""

def offload_names() -> list[str]:
    """Returns the names that the option `sidestep` accepts in `collective=NAME`, apart from `host`."""

def device_keys() -> list[tuple[str, str, str]]:
    """Returns the keys of a device URL: name, accepted values, and purpose of each."""

def device_facts(text: str, world: int) -> dict[str, Any]:
    """Returns what a device URL means for `world` ranks: the text that ranks must agree on (`agreed`), the driver's settings
    and `routes`.

    Each route has collective, operator, dtype, whether the device runs it, and the reason if not.
    Raises ValueError if `text` is not a device URL.
    """

def device_dump(text: str, rank: int, world: int) -> dict[str, Any]:
    """Returns the readable state of a rank's device: `registers` and `state`.

    A register is (name, offset, value, description). `state` describes the device's tables in words, or is None before
    they are set up. Raises ValueError if `text` is not a device URL, RuntimeError if the device cannot be reached.
    """

def device_reset(text: str, rank: int, world: int) -> str:
    """Resets a rank's device and returns its name. Raises the same exceptions as `device_dump`."""

def run_emulator(arguments: list[str]) -> int:
    """Runs the command `accl-emulator` until a signal ends it. Returns the exit status."""

def announce_transport(name: str) -> None:
    """Allows settings to name a transport that is registered later."""

def register_transport(table: Any) -> str:
    """Adds a transport and returns its name; see `torch_accl.register_transport`."""

class Codecs:
    """The codecs of a call's tensors.

    Each tensor has three codecs, in this order: inside hosts, for parts of sums, for results. Its number selects its
    stream of random numbers. Raises ValueError if a text is not a codec.
    """

    def __init__(self, tensors: list[tuple[str, str, str, int]]) -> None: ...
    @property
    def text(self) -> str:
        """The codecs and their settings as text."""

    def encoded_bytes(self, position: int, dtype: str, elements: int) -> tuple[int, int]:
        """Returns the encoded bytes of the tensor at this position: as a part of a sum, and as a result."""

    def __len__(self) -> int: ...

class Measured:
    """Measurements of one tensor, summed over completed calls."""

    @property
    def calls(self) -> int: ...
    @property
    def compared(self) -> int:
        """Number of result elements that were compared with exact ones."""

    @property
    def error(self) -> float:
        """Sum of the squared errors of the compared elements."""

    @property
    def square(self) -> float:
        """Sum of the squares of the exact elements that were compared."""

    @property
    def carried_calls(self) -> int:
        """Number of calls with error feedback whose gradients were not all zeros."""

    @property
    def carried(self) -> float:
        """Sum over these calls of the norm of this rank's residual, divided by the norm of its gradient."""

    @property
    def not_finite(self) -> int:
        """Number of buckets that this rank encoded as NaN because a value was not finite."""

    @property
    def too_large(self) -> int:
        """Number of buckets that this rank encoded as NaN because their metadata cannot hold their range."""

    @property
    def nanos(self) -> int:
        """Nanoseconds that this rank spent on encoding, decoding and adding."""

class ErrorStats:
    """Accumulates the measurements of calls, one record per tensor."""

    def __init__(self, tensors: int) -> None: ...
    def read(self) -> list[Measured]: ...

class Encoding:
    """Encoding of calls: codecs, seed, step, residuals and statistics.

    `residuals` are two lists of addresses of float32 arrays, one value per tensor element; 0 means no array. The engine reads and
    writes the arrays until a call completes or, if it copies the tensors of an accelerator, until a wait for it returns. The first list is for contributions: each tensor of each block, block
    by block. The second is for sums: one array per tensor. The arrays lie in host memory or, with `on_device`, on the device of the
    call's tensors. `on_device` has an address for each array of the first list, of a byte on the device that is 0 if the array
    is not used, and a function. If the host has to encode, the function moves the arrays to host memory and returns their new
    addresses. With `stats` the call is measured, and about one element in
    `one_in` is compared with the exact sum (0: none).
    """

    def __init__(
        self,
        codecs: Codecs,
        seed: int = 0,
        step: int = 0,
        residuals: tuple[list[int], list[int]] | None = None,
        stats: ErrorStats | None = None,
        one_in: int = 0,
        on_device: tuple[list[int], Callable[[], tuple[list[int], list[int]]]] | None = None,
    ) -> None: ...
    @staticmethod
    def none() -> Encoding:
        """Returns an encoding that sends data unchanged, even in a group that compresses all calls."""

def encode_calls(encoding: Encoding | None) -> Encoding | None:
    """Sets how calls that this thread issues from now on are encoded; None selects the group's default.

    Returns the previous value.
    """

def check_codec(text: str) -> str:
    """Returns a codec with all settings that were left out. Raises ValueError if `text` is not a codec."""

def codec_facts(text: str) -> _CodecFacts:
    """Returns the codec table's facts about a codec with its settings: the fields of `compression._codecs.Facts`.

    Raises ValueError if `text` is not a codec.
    """

def codecs() -> list[_CodecRow]:
    """Returns the rows of the codec table.

    Keys: `name`; `spelled` (with a placeholder for bits); `description`; `settings` (their names); `bits` (minimum and
    maximum) and `buckets` (in words), each None if there is no choice; `needs_feedback`; and `auto`, the codecs that
    `codec="auto"` tries.
    """

def _finds_pybind11() -> bool:
    """Whether the running torch was built with the same pybind11; called by the version gate."""

def _define() -> None:
    """Defines the module's classes and functions, once. Before, the module has only what the version gate calls."""

def _bridged_functions() -> list[str]: ...
def _panic_for_test(name: str) -> None: ...
def _lend_gpu_driver(path: str | PathLike[str]) -> None: ...
def _holds_memory(error: str) -> bool:
    """Whether the text of an error says that memory of the call may still be used."""

class _SingleKernels:
    """Kernels of one codec for tensors of one dtype, such as `"float32"`, on one device. For benchmarks."""

    def __init__(self, device_type: int, index: int, is_rocm: bool, codec: str, dtype: str) -> None: ...
    def code_bytes(self, elems: int) -> int:
        """Bytes of `elems` encoded elements."""

    def launch(self, work: str, values: int, code: int, sums: int, elems: int, stream: int) -> None:
        """Enqueues `"encode"`, `"feedback"`, `"decode"` or `"decode_add"` on a native stream, with addresses of the device."""
