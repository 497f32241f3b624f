"""How torch finds the backend, and how the backend refuses a torch for which it was not built."""

import os
import shutil
import subprocess
import sys
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
from support import BACKEND, run_script
from support.scripts import free_port
from support.versions import LOADED_WITH_TORCH, MINOR, NAME, but_this, has

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def found(name: str) -> Path:
    """Returns the path of a file of the installed package, without importing the package."""
    return next(Path(file.locate()) for file in distribution("torch-accl").files if str(file) == name)


def in_one_process(code: str) -> str:
    """Runs the code on the only rank of a world of 1. Checks that it exits with status 0 and returns its standard
    output.
    """
    # Backtraces are off, because resolving the symbols of torch takes seconds for each panic.
    (script,) = run_script(textwrap.dedent(code), env={"RUST_BACKTRACE": "0"})
    assert script.exitcode == 0, script.stderr
    return script.stdout


def plain_python(code: str, **env) -> subprocess.CompletedProcess:
    """Runs the code in a new interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_a_group_can_be_made_without_an_import():
    result = plain_python(
        f"""
        import sys, torch.distributed as dist
        assert [name for name in sys.modules if name.startswith("torch_accl")] == {LOADED_WITH_TORCH}
        dist.init_process_group("accl")
        import torch
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        print(tensor.tolist(), dist.get_backend())
        """,
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert result.returncode == 0 and result.stdout == "[1.0, 1.0, 1.0] accl\n", result.stderr


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_group_serves_no_gpus_where_no_driver_is(has_driver):
    printed = in_one_process(
        f"""
        import torch, torch.distributed as dist
        from torch_accl import _register
        torch.version.cuda, torch.version.hip = "13.0", None
        _register._is_there = lambda library: {has_driver}
        dist.init_process_group("accl")
        print(*sorted(device.type for device in dist.group.WORLD._device_types))
        dist.destroy_process_group()
        dist.init_process_group("cpu:accl,cuda:accl")
        print(*sorted(device.type for device in dist.group.WORLD._device_types))
        dist.destroy_process_group()
        """
    )
    assert printed.splitlines() == ["cpu cuda" if has_driver else "cpu", "cpu cuda"]


@pytest.mark.parametrize("name", ["accl", "cpu:accl", "cpu:accl,cuda:gloo"])
def test_every_spelling_works_without_an_import(name):
    printed = in_one_process(
        f"""
        import torch, torch.distributed as dist
        dist.init_process_group({name!r})
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        print(dist.group.WORLD._get_backend(torch.device("cpu")).name())
        dist.destroy_process_group()
        """
    )
    assert printed == "accl\n"


def test_torchrun_starts_two_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, torch.distributed as dist
            dist.init_process_group("accl")
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            sys.stdout.write(f"sum {tensor[0].item()}\\n")
            dist.destroy_process_group()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0 and result.stdout.count("sum 2.0") == 2, result.stderr


def test_the_package_can_be_imported_any_number_of_times():
    printed = in_one_process(
        """
        import importlib, torch.distributed as dist
        import torch_accl
        torch_accl.register()
        torch_accl.register()
        importlib.reload(torch_accl)
        import torch_accl
        assert dist.Backend.ACCL == "accl" and dist.is_backend_available("accl")
        dist.init_process_group("accl")
        dist.barrier()
        print("done")
        """
    )
    assert printed == "done\n"


def test_an_import_starts_no_thread_and_opens_no_socket():
    printed = in_one_process(
        """
        import os
        def counts():
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        before = counts()
        import torch_accl
        print(before == counts())
        """
    )
    assert printed == "True\n"


def test_the_backend_of_a_group_has_its_own_type():
    printed = in_one_process(
        """
        import torch, torch.distributed as dist, torch_accl
        dist.init_process_group("accl")
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        print(isinstance(backend, torch_accl.Backend), isinstance(backend.options, dist.ProcessGroup.Options)
              if hasattr(dist.ProcessGroup, "Options") else True, backend.first_error() == "", len(backend.describe()) > 0)
        """
    )
    assert printed == "True True True True\n"


def test_stubs_and_the_typing_marker_are_installed():
    assert found("torch_accl/py.typed").exists() and found("torch_accl/_native.pyi").exists()


def test_the_entry_point_is_that_of_the_torch_it_was_built_for():
    new, old = entry_points(group="torch.distributed.backends"), entry_points(group="torch.backends")
    assert ("accl" in new.names) == (MINOR >= (2, 14))
    assert ("accl" in old.names) == (MINOR < (2, 14))


def test_the_wheel_asks_for_the_torch_it_was_built_for():
    assert any(
        need.replace(" ", "").startswith("torch") and NAME in need for need in distribution("torch-accl").requires or []
    )


FAKE_TORCH = """
import importlib.abc, importlib.machinery, sys, types
torch = types.ModuleType("torch")
torch.__version__ = {version!r}
torch.distributed = types.ModuleType("torch.distributed")
torch.distributed.is_available = lambda: True
sys.modules["torch"], sys.modules["torch.distributed"] = torch, torch.distributed
"""


@pytest.mark.parametrize(
    "running", but_this("2.11.0", "2.13.0+cpu", "2.14.1", "2.15.0", "2.16.0", "2.16.0a0+git123abc", "3.0.0")
)
def test_another_torch_is_refused_before_the_native_module_is_loaded(running):
    result = plain_python(
        FAKE_TORCH.format(version=running)
        + textwrap.dedent(
            """
            try:
                import torch_accl
            except ImportError as error:
                print(error)
            maps = open("/proc/self/maps").read()
            print("native loaded:", "torch_accl._native" in sys.modules or "torch_accl/_native" in maps)
            """
        )
    )
    minor = ".".join(running.split(".")[:2])
    sentence, loaded = result.stdout.splitlines()[-2:]
    assert loaded == "native loaded: False"
    assert f"built for torch {NAME}" in sentence and f"torch {running}" in sentence, sentence
    assert f"torch=={NAME}" in sentence and f"TORCH={minor}" in sentence, sentence


@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu132", "a0+git123abc", "rc1"])
def test_every_build_of_the_right_minor_version_is_taken(suffix):
    result = plain_python(
        f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("gate", {str(found("torch_accl/_gate.py"))!r})
        gate = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(gate)
        print(gate.refusal({NAME + ".0" + suffix!r}, [{NAME!r}]))
        """
    )
    assert result.stdout == "None\n", result.stderr


def native() -> Path:
    """Returns the path of the native module for this torch."""
    return found(f"torch_accl/_native_torch_{NAME.replace('.', '_')}{EXTENSION_SUFFIXES[0]}")


@pytest.fixture
def source_tree(tmp_path):
    """Returns a copy of the package's sources, as an editable installation has them. A test puts native modules next to
    them.
    """
    package = tmp_path / "torch_accl"
    shutil.copytree(
        found("torch_accl/__init__.py").parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return package


def imported_from(tree: Path, before: str = "") -> str:
    """Imports the package in `tree`. Returns the error, or the native module's path, its torch and the base class of
    its `Backend`.
    """
    result = plain_python(
        f"""
        import sys, torch
        sys.path.insert(0, {str(tree.parent)!r})
        {before}
        try:
            import torch_accl
        except ImportError as error:
            print(error)
        else:
            from torch_accl import _native
            print(_native.__file__, _native.built_for()["torch"], _native.Backend.__mro__[1].__name__)
        """
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


OTHER = "2.13" if NAME != "2.13" else "2.14"


def test_the_native_module_has_the_name_of_its_torch():
    assert native().exists()
    assert [file.name for file in native().parent.glob("*.so")] == [native().name]


@pytest.mark.slow
def test_of_modules_for_several_torches_in_one_folder_that_of_the_running_one_is_taken(source_tree):
    shutil.copy(native(), source_tree)
    # Neither the module that was built last nor the module of an older release is opened.
    for name in (f"_native_torch_{OTHER.replace('.', '_')}", "_native_torch_9_9", "_native"):
        (source_tree / f"{name}{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    said = imported_from(source_tree)
    assert said.startswith(f"{source_tree / native().name} {NAME}.") and said.endswith(" Backend"), said


@pytest.mark.slow
def test_a_source_tree_that_was_built_for_another_torch_is_refused_by_name(source_tree):
    shutil.copy(native(), source_tree / native().name.replace(NAME.replace(".", "_"), OTHER.replace(".", "_")))
    said = imported_from(source_tree)
    assert f"built for torch {OTHER}, but torch {NAME}." in said and f"TORCH={NAME}" in said, said


@pytest.mark.slow
def test_a_module_for_another_torch_under_the_name_of_this_one_is_refused_before_it_is_used(source_tree):
    shutil.copy(native(), source_tree / native().name.replace(NAME.replace(".", "_"), "9_9"))
    said = imported_from(source_tree, before='torch.__version__ = "9.9.1"')
    assert "_native_torch_9_9" in said, said
    assert f"was built for torch {NAME}." in said and "but torch 9.9.1 is running" in said and "TORCH=9.9" in said, said


@pytest.mark.slow
def test_a_module_of_another_abi_is_refused_before_it_is_used(source_tree):
    shutil.copy(native(), source_tree)
    said = imported_from(source_tree, before="torch._C._GLIBCXX_USE_CXX11_ABI = not torch._C._GLIBCXX_USE_CXX11_ABI")
    assert native().name in said and "C++ ABI" in said, said


@pytest.mark.slow
def test_a_module_that_does_not_load_is_named(source_tree):
    (source_tree / native().name).write_bytes(b"not a library")
    said = imported_from(source_tree)
    assert said.startswith(f"{native().name} does not load with torch {NAME}."), said


@pytest.mark.slow
def test_a_source_tree_that_was_not_built_says_how(source_tree):
    said = imported_from(source_tree)
    assert "was not built" in said and f"TORCH={NAME} pip install ." in said, said


@pytest.mark.slow
def test_a_source_tree_that_was_built_for_another_python_is_refused(source_tree):
    (source_tree / f"_native_torch_{NAME.replace('.', '_')}.cpython-27-x86_64-linux-gnu.so").touch()
    said = imported_from(source_tree)
    assert "another Python" in said and "cpython-27" in said and EXTENSION_SUFFIXES[0] in said, said


@pytest.mark.slow
def test_a_module_that_is_not_filled_has_nothing_of_torch():
    result = plain_python(
        f"""
        import torch
        from importlib.machinery import ExtensionFileLoader
        from importlib.util import module_from_spec, spec_from_loader
        loader = ExtensionFileLoader("torch_accl._native", {str(native())!r})
        module = module_from_spec(spec_from_loader("torch_accl._native", loader))
        loader.exec_module(module)
        facts = module.built_for()
        print(sorted(facts), facts["torch"] == torch.__version__.split("+")[0], module._finds_pybind11())
        print([name for name in dir(module) if isinstance(getattr(module, name), type)])
        """
    )
    assert result.stdout.splitlines() == ["['cxx11_abi', 'pybind11', 'torch', 'version'] True True", "[]"], (
        result.stderr
    )


def command(*arguments: str, before: str = "") -> subprocess.CompletedProcess:
    """Runs `accl` as its entry point does, after the code `before`. The last line on standard error says whether torch
    was loaded.
    """
    return plain_python(
        f"""
        import sys
        {before}
        from importlib.metadata import entry_points
        (accl,) = entry_points(group="console_scripts", name="accl")
        sys.argv[1:] = {list(arguments)!r}
        try:
            status = accl.load()()
        except SystemExit as ended:
            status = ended.code
        print("torch" in sys.modules, file=sys.stderr)
        sys.exit(status)
        """
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["config", "--help"], ["bench", "--help"], ["bench", "--ranks", "two"], ["what"], []],
    ids=" ".join,
)
def test_help_and_usage_errors_of_the_command_load_no_torch(arguments):
    ended = command(*arguments)
    assert ended.returncode == (0 if "--help" in arguments else 2), ended.stderr
    assert ended.stderr.splitlines()[-1] == "False"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["info"], ["config"], ["algorithms"], ["bench"], ["simulate", "--ranks", "2"]], ids=" ".join
)
@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ("import torch; torch.__version__ = '2.11.0'", f"built for torch {NAME}, but torch 2.11.0 is running"),
        ("sys.modules['torch'] = None", f"no torch is installed for {sys.executable}; torch_accl needs torch {NAME}"),
    ],
    ids=["refused", "missing"],
)
def test_a_command_with_a_torch_that_is(before, shown, arguments):
    ended = command(*arguments, before=before)
    sentence, _ = ended.stderr.splitlines()
    assert ended.returncode == 1 and not ended.stdout
    assert sentence.startswith(f"accl {arguments[0]}: ") and shown in sentence, sentence


def test_a_torch_whose_libraries_are_missing_is_one_sentence_of_the_command(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')")
    ended = command("info", before=f"sys.path.insert(0, {str(tmp_path)!r})")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[0] == "accl info: libgomp.so.1: cannot open shared object file"


AUTOLOAD = """
import importlib.abc, importlib.util, sys
import torch, torch.distributed as dist

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "torch_accl":
            raise {error}

sys.meta_path.insert(0, Missing())
spec = importlib.util.spec_from_file_location("torch_accl_autoload", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.register()
module.register()
assert not [name for name in sys.modules if name.startswith("torch_accl.") or name == "torch_accl"]
assert "ACCL" in dist.Backend._plugins
try:
    dist.init_process_group("accl")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ('ModuleNotFoundError("No module named torch_accl", name="torch_accl")', "No module named torch_accl"),
        ('ImportError("libsomething.so: undefined symbol")', "undefined symbol"),
        ('SyntaxError("broken file")', "broken file"),
    ],
    ids=["missing", "not_loadable", "broken"],
)
def test_the_autoload_file_survives_a_package_that_is(error, shown):
    printed = in_one_process(AUTOLOAD.format(error=error, path=str(found("torch_accl_autoload.py"))))
    assert shown in printed


def test_the_autoload_file_imports_nothing_of_the_package_until_a_group_is_made():
    printed = in_one_process(
        f"""
        import importlib.util, sys, torch, torch.distributed as dist
        spec = importlib.util.spec_from_file_location("torch_accl_autoload", {str(found("torch_accl_autoload.py"))!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.register()
        print("torch_accl" in sys.modules)
        dist.init_process_group("accl")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        print("torch_accl" in sys.modules)
        """
    )
    assert printed == "False\nTrue\n"


def test_the_autoload_file_survives_without_torch_distributed():
    result = plain_python(
        f"""
        import importlib.util, sys, types, warnings
        sys.modules["torch"] = types.ModuleType("torch")
        spec = importlib.util.spec_from_file_location("torch_accl_autoload", {str(found("torch_accl_autoload.py"))!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        warnings.simplefilter("ignore")
        module.register()
        print("alive")
        """
    )
    assert result.stdout == "alive\n", result.stderr


PANICS = """
import os
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # the flight recorder queries works and discards their exceptions
import sys, torch, torch.distributed as dist, torch_accl
from datetime import timedelta
from torch_accl import _native

def profiled(call):
    with torch.autograd.profiler.profile(record_shapes=True):
        call()

def actions(group):
    backend, tensor, works = group._get_backend(torch.device("cpu")), torch.ones(3), []
    keep = works.append
    yield lambda: dist.new_group()
    yield lambda: dist.all_reduce(tensor, group=group)
    yield lambda: keep(dist.all_reduce(tensor, group=group, async_op=True))
    yield lambda: works[-1].get_future().wait()
    yield lambda: works[-1]._get_sequence_number()
    yield lambda: works[-1].exception()
    yield lambda: keep(group.recv_anysource([tensor], 5))
    yield lambda: works[-1].is_completed()
    yield lambda: works[-1].wait(timedelta(milliseconds=50))
    yield lambda: group.send([tensor], 0, 5).wait()
    yield lambda: works[-1].wait()
    yield lambda: works[-1].source_rank()
    yield lambda: backend._enable_collectives_timing()
    yield lambda: keep(dist.all_reduce(tensor, group=group, async_op=True))
    yield lambda: (works[-1].wait(), works[-1]._get_duration())
    yield lambda: dist.all_reduce(torch.eye(3).to_sparse(), group=group, async_op=True).wait()
    yield lambda: dist.all_reduce(torch.eye(3).to_sparse(), group=group)
    yield lambda: group.monitored_barrier(timedelta(seconds=5))
    yield lambda: backend._get_sequence_number_for_group()
    yield lambda: profiled(lambda: dist.all_reduce(tensor, group=group))
    yield lambda: backend.set_timeout(timedelta(seconds=5))
    yield lambda: (backend.get_error(), backend.first_error(), backend.describe())
    yield lambda: backend.snapshot()
    yield lambda: backend.eager_connect_single_device(torch.device("cpu"))
    yield lambda: backend.algorithm_of("all_reduce", [], [tensor], dist.ReduceOp.SUM, 0)
    yield lambda: backend.time_calls("all_reduce", [], [tensor], dist.ReduceOp.SUM, 0, 1, 1, True)
    yield lambda: group.split_group([0])
    yield lambda: backend.abort()
    yield lambda: dist.destroy_process_group(group)

def child(name):
    dist.init_process_group("accl", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group()
    _native._panic_for_test(name)
    said = []
    for action in actions(group):
        try:
            action()
        except Exception as error:
            said.append(str(error))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return any(f"panic in {name}" in text for text in said)

for name in _native._bridged_functions():
    pid = os.fork()
    if pid == 0:
        reported = child(name)
        os._exit(3 if reported else 4)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

# Functions that torch calls where no error can be raised, that only its background work calls, or that only calls on
# accelerators use.
SILENT = {
    "group_shutdown",
    "group_first_error",
    "group_error_type",
    "event_name",
    "ticket_done",
    "ticket_held",
    "ticket_phases",
    "ticket_poll",
    "ticket_report",
    "ticket_when_done",
    "ticket_when_through",
    "ticket_abort",
}


@pytest.mark.slow
def test_a_panic_in_any_bridged_function_is_an_error_and_not_the_end():
    ends = dict(line.split() for line in in_one_process(PANICS).splitlines())
    assert len(ends) > 15
    assert {name: end for name, end in ends.items() if end not in ("3", "4")} == {}
    # torch versions without this feature never ask for the sequence number.
    silent = SILENT if has("numbers of works") else {*SILENT, "ticket_seq"}
    assert {name for name, end in ends.items() if end == "4"} - silent == set()


@pytest.mark.slow
def test_the_command_lists_settings_algorithms_and_facts():
    printed = in_one_process(
        """
        import torch_accl_cli as cli
        for arguments in (["config"], ["algorithms"], ["info"], ["config", "--json"]):
            assert cli.main(arguments) == 0
        """
    )
    for word in ("ACCL_PORT_RANGE", "rabenseifner", "built_for_torch", '"default"'):
        assert word in printed


def test_a_group_returns_the_algorithm_of_a_call_without_issuing_it():
    printed = in_one_process(
        """
        import functools, torch, torch.distributed as dist
        dist.init_process_group("accl")
        backend, tensor = dist.group.WORLD._get_backend(torch.device("cpu")), torch.ones(3)
        call = dict(inputs=[], outputs=[tensor], op=dist.ReduceOp.SUM, root=0)
        before = backend._get_sequence_number_for_group()
        print(backend.algorithm_of("all_reduce", **call), backend._get_sequence_number_for_group() - before)
        nanos = backend.time_calls("all_reduce", **call, samples=4, calls=5, fenced=False)
        print(len(nanos), min(nanos) > 0, backend._get_sequence_number_for_group() - before)
        for name in ("all_sum", "recv", "broadcast"):
            for ask in (backend.algorithm_of, functools.partial(backend.time_calls, samples=1, calls=1, fenced=False)):
                try:
                    ask(name, **(call | {"root": 7}))
                except (ValueError, NotImplementedError, dist.DistBackendError) as refused:
                    print("refused")
        """
    )
    assert printed.split() == ["direct", "0", "4", "True", "20"] + ["refused"] * 6
