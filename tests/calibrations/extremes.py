"""Calibrations of extreme machines that do not exist, in which one thing costs nothing or dominates the cost.

Owns the files `extreme-*.txt` in this directory; run this script to write them. Constants that a file omits keep their
built-in values.
"""

from pathlib import Path

HERE = Path(__file__).parent

# Number of call sizes for which a constant is measured.
SIZES = 5

LATENCIES = [
    *(f"{link}_{what}_ps" for link in ("shm", "tcp") for what in ("call", "frame", "latency")),
    "network_latency_ps",
    "block_ps",
    "switch_ps",
]
RATES = [
    *(f"{link}_{what}_ps_per_kib" for link in ("shm", "tcp") for what in ("sent", "received")),
    "reduced_ps_per_kib",
    "copied_ps_per_kib",
]

# A thousand times the built-in value.
DEAR_PS_PER_KIB = 20_000_000


def files() -> dict[str, str]:
    """The content of each file, by file name."""
    nothing = [0] * SIZES
    return {
        "extreme-latency-nothing.txt": _text("Only bytes take time.", {name: [0] for name in LATENCIES}),
        "extreme-bandwidth-nothing.txt": _text(
            "Bytes take no time.", {**dict.fromkeys(RATES, nothing), "network_sent_ps_per_kib": [0]}
        ),
        "extreme-reduction-dear.txt": _text(
            "Adding up takes a thousand times as long as usual.", {"reduced_ps_per_kib": [DEAR_PS_PER_KIB] * SIZES}
        ),
    }


def _text(says: str, constants: dict[str, list[int]]) -> str:
    lines = [f"{name} = {', '.join(map(str, values))}" for name, values in constants.items()]
    return "\n".join([f"# {says} Written by extremes.py.", *lines, ""])


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text)
        print(HERE / name)
