"""The calibrations of machines that there are not: one thing costs nothing, or all that there is.

Owns the files `extreme-*.txt` beside it; run it to write them. What a file leaves out is built in.
"""

from pathlib import Path

HERE = Path(__file__).parent

# As many numbers as there are sizes of calls for which they are measured.
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

# A thousand times the built-in one.
DEAR_PS_PER_KIB = 20_000_000


def files() -> dict[str, str]:
    """The text of each file by its name."""
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
