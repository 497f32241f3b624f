"""The device examples with their smallest settings, their reports on devices, and bad verdicts for wrong results."""

import argparse
import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import BACKEND
from support.emulators import Emulator

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import device_collectives
import device_common as common
import device_dlrm
import device_mnist
import device_resnet

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

# Smallest arguments with which each example runs.
SMALLEST = {
    "collectives": ["--elements", "1000", "--repeat", "2"],
    "mnist": ["--steps", "3"],
    "resnet": ["--steps", "1", "--side", "32", "--batch", "2"],
    "dlrm": ["--steps", "4", "--rows", "100", "--batch", "12"],
}
SUM = "all_reduce float32 SUM"


def run(name, *arguments, launcher=()):
    """Runs an example to its end and returns the completed process."""
    script = str(EXAMPLES / f"device_{name}.py")
    command = [sys.executable, *launcher, script, *SMALLEST[name], *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def figures(tmp_path, name, *arguments, **how):
    """Runs an example successfully and returns the figures that it wrote as JSON."""
    path = tmp_path / "figures.json"
    done = run(name, "--json", path, *arguments, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verified: " in done.stdout
    found = json.loads(path.read_text())
    assert found["is_good"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_two_ranks_end_with_the_bits_of_the_host_path(tmp_path, name):
    found = figures(tmp_path, name)
    assert "bit for bit" in found["verdict"]
    host, sim = found["runs"]
    assert (host["device"], host["calls"], sim["device"]) == ("none", {}, "sim")
    assert host["losses"] == sim["losses"] and sim["calls"][SUM] > 0
    assert host["collectives"] == sim["collectives"] >= sum(sim["calls"].values())
    if name == "dlrm":
        # Indices and rows are exchanged in each step and in the test, gradients in each step.
        assert sim["calls"]["all_to_all int64"] == 5 and sim["calls"]["all_to_all float32"] == 9


@pytest.mark.slow
def test_what_a_device_does_not_do_stays_on_the_host(tmp_path):
    found = figures(tmp_path, "collectives", "--ranks", 3, "--device", "sim://?design=udp")
    calls = found["runs"][1]["calls"]
    assert calls["broadcast float32"] >= 2 and not any("all_to_all" in call or "MAX" in call for call in calls)
    found = figures(tmp_path, "dlrm", "--ranks", 3)
    assert found["runs"][1]["tables a rank"] == "3/3/2"
    assert not any("all_to_all" in call for call in found["runs"][1]["calls"])


@pytest.mark.slow
def test_under_torchrun_and_without_a_device_an_example_runs_as_well(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = figures(tmp_path, "collectives", "--device", "none", launcher=launcher)
    assert len(found["runs"]) == 1 and "only the host path ran" in found["verdict"]


@pytest.mark.slow
def test_float16_on_the_wire_is_said_to_lose_bits(tmp_path):
    found = figures(tmp_path, "mnist", "--device", "sim://?compression=fp16")
    assert "float16 on the wire loses bits" in found["verdict"] and found["runs"][1]["calls"][SUM] > 0


@pytest.mark.slow
def test_emulators_give_the_same_bits(tmp_path):
    with Emulator(2, "cyt_rdma") as emulator:
        port = emulator.port
        found = figures(tmp_path, "mnist", "--device", f"emulator://127.0.0.1:{port}")
    assert "bit for bit" in found["verdict"] and found["runs"][1]["calls"][SUM] > 0


@pytest.mark.slow
def test_a_device_that_makes_no_sense_or_does_not_open_is_one_sentence():
    done = run("dlrm", "--device", "sim://?desgin=udp")
    assert done.returncode == 2 and "did you mean design?" in done.stderr
    done = run("dlrm", "--device", "emulator://127.0.0.1:1")
    assert done.returncode == 1 and "no emulator answers at 127.0.0.1:" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("module", [device_collectives, device_mnist, device_resnet, device_dlrm])
def test_help_says_what_is_on_the_device(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__file__, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "he device runs" in " ".join(said.split()) and "--device" in said and "emulator://" in said


# ---- the verdict


def runs_with(device, weights, losses=(1.0, 1.0), exact=(3.0,), calls=1):
    host = common.Run("none", weights=torch.ones(4), losses=[1.0, 1.0], exact=torch.tensor([3.0]))
    done = {SUM: calls} if calls else {}
    weights = torch.tensor(weights)
    other = common.Run(device, weights=weights, losses=list(losses), exact=torch.tensor(exact), calls=done)
    return [host, other]


@pytest.mark.parametrize(
    ("is_good", "world", "runs", "part"),
    [
        (True, 2, runs_with("sim", [1.0] * 4), "bit for bit"),
        (False, 2, runs_with("sim", [1.0, 1, 1, 1.0000001]), "exact in either order"),
        (True, 3, runs_with("sim", [1.0, 1, 1, 1.001]), "depend on their order"),
        (False, 3, runs_with("sim", [1.0, 1, 1, 1.1]), "depend on their order"),
        (True, 2, runs_with("sim://?compression=fp16", [1.0, 1, 1, 2], losses=[1.0, 1.01]), "loses bits"),
        (False, 2, runs_with("sim://?compression=fp16", [1.0, 1, 1, 2], losses=[1.0, 1.2]), "loses bits"),
        (False, 3, runs_with("sim", [1.0] * 4, exact=[4.0]), "1 elements of results differ from the host path"),
        (False, 2, runs_with("sim", [1.0] * 4, calls=0), "the device ran no collectives: the group has no device"),
    ],
)
def test_a_wrong_weight_or_an_idle_device_is_found(is_good, world, runs, part, capsys):
    console = common.Console(width=1000)
    status = common.conclude(runs, argparse.Namespace(json=None), console, world, "the rest")
    said = capsys.readouterr().out
    assert (status == 0) == is_good and part in said
    assert ("Verified: " in said) == is_good and ("Wrong: " in said) != is_good


# ---- data and networks


def idx(magic, tensor):
    return struct.pack(f">I{tensor.dim()}I", magic, *tensor.shape) + bytes(tensor.flatten().tolist())


def test_files_of_mnist_are_read_packed_or_not(tmp_path):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (5, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.arange(5, dtype=torch.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(0x803, images))
    (tmp_path / "train-labels.idx1-ubyte.gz").write_bytes(gzip.compress(idx(0x801, labels)))
    (tmp_path / "t10k-images.idx3-ubyte").write_bytes(idx(0x803, images[:2]))
    with pytest.raises(FileNotFoundError, match="has none of t10k-labels-idx1-ubyte, "):
        device_mnist.mnist(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    for data, part in (
        (idx(0x803, images), "expected an IDX file of unsigned bytes in 1 dimensions"),
        (b"", "expected an IDX file"),
        (idx(0x801, labels)[:-1], "has 4 bytes of data, and its header has the shape"),
        (idx(0x801, labels), "with a label each"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=part):
            device_mnist.mnist(tmp_path)
    path.write_bytes(idx(0x801, labels[:2]))
    found = device_mnist.mnist(tmp_path)
    assert torch.equal(found[0], images.float().unsqueeze(1) / 255) and torch.equal(found[1], labels.long())
    assert found[2].shape == (2, 1, 28, 28) and found[3].tolist() == [0, 1]


def test_the_network_written_out_has_the_size_of_resnet_50():
    with torch.device("meta"):
        model = device_resnet.ResNet50(1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 53
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_images_of_a_folder_have_its_classes(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow reads images, and is not installed")
    with pytest.raises(FileNotFoundError, match="has no folder with images in it"):
        device_resnet.Folder(tmp_path, 8, 0)
    for label, name in enumerate(("ants", "bees")):
        (tmp_path / name).mkdir()
        image.new("RGB", (20, 10), (255 * label, 0, 0)).save(tmp_path / name / "one.png")
        (tmp_path / name / "notes.txt").write_text("no image")
    source = device_resnet.Folder(tmp_path, 8, 0)
    images, labels = source.batch(range(3))
    assert source.classes == ("ants", "bees") and images.shape == (3, 3, 8, 8)
    assert sorted(labels[:2].tolist()) == [0, 1] and labels[2] == labels[0]
    red = (torch.tensor([0.0, 1.0]) - device_resnet.MEAN[0, 0, 0]) / device_resnet.DEVIATION[0, 0, 0]
    assert torch.allclose(images[:, 0, 0, 0], red[labels])
