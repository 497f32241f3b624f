"""`accl device`: explains a device URL, shows the contents of a device, and resets a device."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ._listing import add_json
from ._package import load_native
from ._wrong import WrongInput

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "device"
SUMMARY = "explain, dump or reset a collective engine (CCLO)"

_DESCRIPTION = """\
info: explains a device URL without opening the device: its settings, the collectives that the device runs, and the collectives that
the host runs, with the reason. dump: prints the registers and tables of one rank's device, with explanations. reset: resets one rank's
device.

A device URL is one of sim, sim://?KEY=VALUE&..., emulator://HOST:PORT, emulator://HOST:PORT,HOST:PORT, emulator://@FILE,
xrt://INDEX?xclbin=FILE and coyote://INDEX. Keys:
"""

# Keys that `torch_accl.Options(device=...)` accepts. A test compares them with the keys of the native module.
_KEYS = (
    ("xclbin", "bitstream of a card behind XRT"),
    ("design", "network protocol between the devices: udp, tcp or cyt_rdma"),
    ("ranks", "file with the addresses of all ranks"),
    ("rx_buffers", "number of buffers for eager messages, 1 to about 280"),
    ("rx_bytes", "size of each of these buffers, such as 64KiB"),
    ("eager", "maximum size of an eager message"),
    ("rendezvous", "size of each buffer for sums of larger messages"),
    ("memory", "location of the buffers of calls: host or device"),
    ("compression", "none, or fp16 to add and send float32 sums as float16"),
    ("engine", "name of the engine's kernel in a bitstream for XRT"),
    ("hostctrl", "name of the kernel that starts the engine's calls, in a bitstream for XRT"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION + "\n".join(f"  {name:12} {about}" for name, about in _KEYS)
    parser.add_argument("what", choices=("info", "dump", "reset"))
    parser.add_argument("device", help="device URL, such as emulator://localhost:5500?design=udp")
    parser.add_argument("--rank", type=int, default=0, help="rank whose device is dumped or reset (default: 0)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks (default: 2, or as many as --rank needs)"
    )
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Runs `info`, `dump` or `reset`."""
    if given.ranks is None:
        given.ranks = max(2, given.rank + 1)
    if given.ranks < 1 or not 0 <= given.rank < given.ranks:
        raise WrongInput(f"--rank: rank {given.rank} does not exist among {given.ranks} ranks")
    native = load_native()
    try:
        found, text = _found(native, given)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    except RuntimeError as error:
        print(f"accl device: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if given.json else text)
    return 0


def _found(native: Any, given: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if given.what == "info":
        facts = native.device_facts(given.device, given.ranks)
        return _named_routes(facts), _show_facts(facts)
    if given.what == "dump":
        dump = native.device_dump(given.device, given.rank, given.ranks)
        names = ("name", "offset", "value", "about")
        registers = [dict(zip(names, register, strict=True)) for register in dump["registers"]]
        return dump | {"registers": registers}, _show_dump(dump)
    name = native.device_reset(given.device, given.rank, given.ranks)
    return {"device": name, "reset": True}, f"{name} is reset; create the groups that used it again"


def _named_routes(facts: dict[str, Any]) -> dict[str, Any]:
    names = ("collective", "op", "dtype", "device", "why")
    return facts | {"routes": [dict(zip(names, route, strict=True)) for route in facts["routes"]]}


def _show_facts(facts: dict[str, Any]) -> str:
    lines = [f"{name:17} {value}" for name, value in facts.items() if name != "routes"]
    # Routes with the same target are grouped: by collective and reason, the dtypes with their operators.
    ways: dict[tuple[str, bool, str], dict[str, list[str]]] = {}
    for collective, op, dtype, is_on_device, why in facts["routes"]:
        ways.setdefault((collective, is_on_device, why), {}).setdefault(dtype, []).append(op or "")
    lines.append("")
    for (collective, is_on_device, why), dtypes in ways.items():
        where = "device" if is_on_device else f"host: {why}"
        lines.append(f"{collective:15} {where}")
        if any(other[0] == collective and other != (collective, is_on_device, why) for other in ways):
            by_ops: dict[str, list[str]] = {}
            for dtype, ops in dtypes.items():
                by_ops.setdefault(", ".join(ops), []).append(dtype)
            lines += [f"{'':19} {ops} of {', '.join(names)}" for ops, names in by_ops.items()]
    return "\n".join(lines)


def _show_dump(dump: dict[str, Any]) -> str:
    lines = [dump["device"]]
    lines += [f"  {offset:#06x} {name:21} {value:#010x}  {about}" for name, offset, value, about in dump["registers"]]
    lines.append(f"  {dump['state']}" if dump["is_set_up"] else "  the device is not set up")
    return "\n".join(lines)
