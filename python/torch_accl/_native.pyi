"""Types of the native module.

A class that is a `TypedDict` names the keys of a row, and is not in the module: its name is for annotations alone.
"""

from datetime import timedelta
from typing import Any, TypedDict

from torch import Tensor
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
    """Options of a backend: torch's own, and settings by the names of `torch_accl.Options`."""

    settings: dict[str, str]
    def __init__(self) -> None: ...
    def __copy__(self) -> BackendOptions: ...
    def __deepcopy__(self, memo: dict[int, Any], /) -> BackendOptions: ...

class Backend(_TorchBackend):
    """One rank's backend of one group, as `group._get_backend(device)` returns it."""

    @property
    def options(self) -> BackendOptions: ...
    def _set_default_timeout(self, timeout: timedelta) -> None:
        """As `set_timeout`, by the name that gloo's backend has."""

    def describe(self) -> str:
        """Facts about the group, one a line."""

    def snapshot(self) -> dict[str, Any]:
        """What the group is doing and has done; `docs/torch.md` lists the fields. Costs what it takes to write them down.

        `group`: calls made and failed, bytes, waits, calls in flight with the ranks that they wait for. `ranks`: for each rank its
        process, its link, and what went there. `process`: what progress has cost in all groups of the process. Empty of a group
        that has been destroyed: `group` is None.
        """

    def first_error(self) -> str:
        """The sentence of the cause that made the group unusable, or an empty string."""

    def algorithm_of(
        self,
        collective: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        op: ReduceOp | ReduceOp.RedOpType,
        root: int,
    ) -> str:
        """The algorithm that a call takes in this group. Makes no call; all ranks get the same answer.

        A call is described by its blocks, a tensor each: in place as `outputs` where torch's call is (all_reduce,
        reduce, broadcast); one for each rank in `inputs` of reduce_scatter, all_to_all and the root's scatter, and in
        `outputs` of all_gather, all_to_all and the root's gather.
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
        """Makes `samples` times `calls` blocking calls below torch, without the interpreter; nanoseconds of each sample.

        For benches. The calls go the road of every blocking call; all ranks must make the same. `fenced` puts a
        barrier, which is not counted, before each sample.
        """

class LayerPlan:
    """What all ranks do in a layer-parallel solve or pipeline. Operations are tuples that begin with their name."""

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
    """The process's engine; one per process."""

    def __init__(self) -> None: ...
    def create_backend(self, store: Store, rank: int, size: int, options: BackendOptions, is_default: bool) -> Backend:
        """Makes a backend: collective over all ranks; blocks until they are connected or the timeout passed.

        `is_default`: it is that of the default process group, which has the device. All ranks say so, or none.
        """

    def shutdown(self, await_calls: bool = False) -> None:
        """Says goodbye to all peers and stops the threads. Bounded, silent, any number of times."""

def built_for() -> _BuiltFor:
    """What the module was built for: `version` of this package, `torch` as its headers say, `cxx11_abi`, `pybind11`."""

def config_rows() -> list[_ConfigRow]:
    """The rows of the configuration table, with the values that the environment gives."""

def algorithms() -> list[_AlgorithmRow]:
    """The rows of the table of algorithms."""

def dtypes() -> list[_DtypeRow]:
    """The types of elements that can be sent: `name` as in torch, `bytes` of one, `ops` that reduce them."""

def host_facts() -> _HostFacts:
    """What this process would offer its peers: instruction set, transports, interfaces."""

def simulate(
    collective: str,
    sizes: list[int],
    world: tuple[int, int, int],
    link: tuple[int, int] | None,
    machine_file: str | None,
) -> list[dict[str, Any]]:
    """For each size `bytes`, the algorithm `chosen` and `times_us` by algorithm. `world` has
    ranks, ranks per host and cores per host, `link` picoseconds for a KiB of a host's
    connection and for the way; `machine_file` replaces the constants of this machine.

    Raises ValueError for what makes no world, and for a file that holds no constants.
    """

def calibration(anew: bool) -> dict[str, Any]:
    """The `constants` of this machine, their `source` and `age_s`; measured anew where asked for."""

def check_option(option: str, value: str) -> None:
    """Raises ValueError for an unknown option or a value that is not accepted."""

def device_keys() -> list[tuple[str, str, str]]:
    """The keys of a device's text: name, what it accepts, and what it is for."""

def device_facts(text: str, world: int) -> dict[str, Any]:
    """What a device's text means for so many ranks: `agreed` text, driver settings, and `routes`, each of collective, operator, dtype,
    whether the device does it, and if not, why. Raises ValueError for what is no device."""

def device_dump(text: str, rank: int, world: int) -> dict[str, Any]:
    """What can be read of a rank's device: `registers`, each of name, offset, value and a sentence, and the `state` of its tables in words.
    Raises ValueError for what is no device, RuntimeError for one that cannot be reached."""

def device_reset(text: str, rank: int, world: int) -> str:
    """Resets a rank's device, and returns its name. Raises as `device_dump`."""

def run_emulator(arguments: list[str]) -> int:
    """Runs the command `accl-emulator` until a signal ends it; returns the exit status."""

def announce_transport(name: str) -> None:
    """Lets settings name a transport that is handed in later."""

def register_transport(table: Any) -> str:
    """Adds a transport; see `torch_accl.register_transport`."""

class Codecs:
    """The codecs of a call's tensors: of each, those inside hosts, of parts of sums and of results, and a number that
    tells its random numbers from those of others. Raises ValueError for what is no codec."""

    def __init__(self, tensors: list[tuple[str, str, str, int]]) -> None: ...
    @property
    def text(self) -> str:
        """The settings in words."""

    def encoded_bytes(self, position: int, dtype: str, elements: int) -> tuple[int, int]:
        """Bytes that a tensor at this position becomes on its way to be added up, and on its way back."""

    def __len__(self) -> int: ...

class Measured:
    """What was measured of one tensor, added up over calls that are done."""

    @property
    def calls(self) -> int: ...
    @property
    def compared(self) -> int:
        """Elements of results that were compared with exact ones."""

    @property
    def error(self) -> float:
        """Sum of the squares of their errors."""

    @property
    def square(self) -> float:
        """Sum of the squares of the exact ones."""

    @property
    def carried_calls(self) -> int:
        """Calls with error feedback on gradients that were not all zeros."""

    @property
    def carried(self) -> float:
        """Sum over these of the norm of what this rank carries over, by the norm of its gradient."""

    @property
    def not_finite(self) -> int:
        """Buckets that this rank encoded as NaN for a value that is not finite."""

    @property
    def too_large(self) -> int:
        """Buckets that this rank encoded as NaN because their metadata cannot hold their range."""

    @property
    def nanos(self) -> int:
        """Time that this rank took to encode, decode and add, in nanoseconds."""

class ErrorStats:
    """Where calls enter what was measured of each of their tensors."""

    def __init__(self, tensors: int) -> None: ...
    def read(self) -> list[Measured]: ...

class Encoding:
    """How calls are encoded.

    `residuals` are addresses of float32, one for each element of a tensor, that are read and written until a call ends: of
    the contributions of each tensor of each block, one block after the other, and of the sums of each tensor; 0 for none.
    With statistics the call is measured, and about one element in `one_in` is compared with the exact sum (0: none).
    """

    def __init__(
        self,
        codecs: Codecs,
        seed: int = 0,
        step: int = 0,
        residuals: tuple[list[int], list[int]] | None = None,
        stats: ErrorStats | None = None,
        one_in: int = 0,
    ) -> None: ...
    @staticmethod
    def none() -> Encoding:
        """Calls travel as they are, also in a group that encodes all."""

def encode_calls(encoding: Encoding | None) -> Encoding | None:
    """Says how calls that this thread makes from now on are encoded; None: as their group does by default. What was said before."""

def check_codec(text: str) -> str:
    """A codec's settings with all that was left out; raises ValueError for what is none."""

def codec_facts(text: str) -> _CodecFacts:
    """What the table says of a codec with its settings: the fields of `compression._codecs.Facts`. Raises ValueError for what is none."""

def codecs() -> list[_CodecRow]:
    """The rows of the table of codecs: `name`, `spelled` (with a word for bits), `description`, `settings` (their names), `bits` (the least
    and the most) and `buckets` (in words) where there is a choice, `needs_feedback`, and `auto`, what the choice by measurement tries."""

def _finds_pybind11() -> bool:
    """Whether the running torch was built with the same pybind11; asked by the version gate."""

def _define() -> None:
    """Fills the module, once: before, it has only what the version gate asks for."""

def _bridged_functions() -> list[str]: ...
def _panic_for_test(name: str) -> None: ...
