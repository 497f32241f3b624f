"""The environment variables of oneCCL and torch-ccl: their meaning here, and the list of those without effect.

Owns their names and meanings. A setting of accl that is given takes precedence over all of them. A value that oneCCL
would not accept raises a `ValueError` that names the variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = ["settings_of", "without_effect"]

# oneCCL's algorithms that accl has under another name. Algorithms that would only be a rough substitute are left out.
_ALGORITHMS = {
    "CCL_ALLREDUCE": (
        "all_reduce",
        {
            "rabenseifner": "rabenseifner",
            "nreduce": "direct_two_phase",
            "ring": "ring",
            "ring_rma": "ring",
            "double_tree": "double_binary_tree",
            "recursive_doubling": "recursive_doubling",
            "2d": "two_level",
        },
    ),
    "CCL_REDUCE_SCATTER": ("reduce_scatter", {"naive": "direct", "ring": "ring"}),
    "CCL_ALLGATHER": ("all_gather", {"naive": "direct", "flat": "direct", "ring": "ring"}),
    "CCL_ALLGATHERV": ("all_gather", {"naive": "direct", "flat": "direct", "ring": "ring"}),
    "CCL_BCAST": ("broadcast", {"naive": "flat"}),
    "CCL_BROADCAST": ("broadcast", {"naive": "flat"}),
    "CCL_REDUCE": ("reduce", {"tree": "binomial"}),
    "CCL_ALLTOALL": ("all_to_all", {"naive": "direct", "scatter": "direct"}),
    "CCL_ALLTOALLV": ("all_to_all", {"naive": "direct", "scatter": "direct"}),
}
# Other algorithm names of oneCCL: they are valid and choose nothing here.
_NOT_OURS = {"direct", "multi_bcast", "double_tree", "rabenseifner", "ring", "topo", "tree", "naive"}
_LEVELS = {"error": "off", "warn": "warn", "info": "info", "debug": "debug", "trace": "trace"}
_PREFIXES = ("CCL_", "ONECCL_BINDINGS_FOR_PYTORCH_", "TORCH_CCL_")
# Variables set by oneCCL's installation, which do not affect a run.
_OF_THE_INSTALLATION = {"CCL_ROOT", "CCL_CONFIGURATION", "CCL_CONFIGURATION_PATH"}


def _level(text: str) -> dict[str, str]:
    if text not in _LEVELS:
        raise ValueError(f"CCL_LOG_LEVEL={text!r}: expected {', '.join(_LEVELS)}")
    return {"log": _LEVELS[text]}


def _workers(text: str) -> dict[str, str]:
    if not text.isdecimal():
        raise ValueError(f"CCL_WORKER_COUNT={text!r}: expected a number of threads; 0 means no worker thread")
    return {"worker_count": text}


def _affinity(text: str) -> dict[str, str]:
    return {"worker_affinity": text}


def _interface(text: str) -> dict[str, str]:
    return {"socket_ifname": "=" + text}


_SETTINGS: dict[str, Callable[[str], dict[str, str]]] = {
    "CCL_LOG_LEVEL": _level,
    "CCL_WORKER_COUNT": _workers,
    "CCL_WORKER_AFFINITY": _affinity,
    "CCL_KVS_IFACE": _interface,
}


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Translates oneCCL's variables to settings of accl, by option name; a set `ACCL_` variable suppresses its option.

    Raises:
        ValueError: a variable has a value that oneCCL does not accept.
    """
    found = {"profile_names": "ccl"}
    for name, read in _SETTINGS.items():
        if text := environment.get(name, "").strip():
            found |= read(text)
    rules = [rule for name in _ALGORITHMS for rule in _rules(name, environment.get(name, ""))]
    if rules:
        found["algorithm"] = ",".join(dict.fromkeys(rules))
    return {option: value for option, value in found.items() if f"ACCL_{option.upper()}" not in environment}


def _rules(name: str, text: str) -> list[str]:
    """Translates a text such as `ring:0-8192;rabenseifner:8193-max` to rules of accl; algorithms without an equal are
    left out."""
    collective, names = _ALGORITHMS[name]
    rules = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = re.fullmatch(r"([a-z0-9_]+)(?::([0-9]+)-([0-9]+|max))?", part)
        if match is None or match[1] not in {*names, *_NOT_OURS}:
            raise ValueError(
                f"{name}={text!r}: expected algorithms of oneCCL such as ring or ring:0-8192;rabenseifner:8193-max"
            )
        theirs, first, last = match.groups()
        if theirs in names:
            of = "" if first is None else f":{first}-{'' if last == 'max' else last}"
            rules.append(f"{collective}={names[theirs]}{of}")
    return rules


def without_effect(environment: Mapping[str, str]) -> list[str]:
    """Returns the variables of oneCCL and torch-ccl that are set and have no effect here."""
    used = {*_SETTINGS, *_OF_THE_INSTALLATION}
    used |= {name for name in _ALGORITHMS if _rules(name, environment.get(name, ""))}
    return sorted(name for name in environment if name.startswith(_PREFIXES) and name not in used and environment[name])
