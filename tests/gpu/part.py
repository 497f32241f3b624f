"""Runs one part in this process: `python -m gpu.part NAME --device cuda --json FILE`. `run.py` starts it.

Owns what a part's process sets before torch is imported. The process never touches the device: its forked ranks do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from pathlib import Path

PARTS = ("order", "peer", "codecs", "bench", "end", "jobs", "suite", "stream")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu.part", description="Runs one part of tests/gpu.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "standin"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="after this time no case begins (default: 540)")
    parser.add_argument("--tiny", action="store_true", help="a little of each case, to test the part itself")
    asked = parser.parse_args()
    # As torchrun does. Ranks share the processor, and a rank must have one thread when it forks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "0")
    # torch then asks NVML whether there is a card, and begins no use of CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if asked.part not in ("peer", "codecs", "bench", "stream"):
        os.environ.setdefault("ACCL_CALIBRATION", "off")

    import torch

    from .report import Report

    facts = {
        "device": asked.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "is_tiny": asked.tiny,
    }
    report = Report(asked.part, asked.json, asked.seconds, facts)
    if asked.device == "standin":
        from support import standin

        standin.build()
    # Ranks inherit what is loaded here.
    importlib.import_module("torch_accl")
    part = importlib.import_module(f".{asked.part}", __package__)
    if importlib.import_module("peers.one_card").is_spoilt():
        print(
            "error: this process has begun to use CUDA, so its ranks cannot; find the import that does", file=sys.stderr
        )
        return 2
    part.run(report, asked.device, asked.tiny)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
