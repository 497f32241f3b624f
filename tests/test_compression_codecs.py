"""The table of codecs as Python sees it: properties come from a codec's row, and every list of codecs is complete."""

import pytest
from support import BACKEND
from torch_accl import _native, compression
from torch_accl.compression import Compression, _codecs
from torch_accl_cli import main

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

ROWS = _native.codecs()


def variants(row):
    """Returns a row's codec with each number of bits that the row accepts."""
    return (
        [f"{row['name']}:{bits}" for bits in range(row["bits"][0], row["bits"][1] + 1)]
        if row["bits"]
        else [row["name"]]
    )


@pytest.mark.parametrize("codec", [codec for row in ROWS for codec in variants(row)])
def test_settings_ask_the_row_whether_error_feedback_is_needed_or_diverges(codec):
    facts = _codecs.facts(codec)
    assert facts.text == _native.check_codec(codec) and facts.short == codec
    if facts.needs_feedback:
        with pytest.raises(ValueError, match=f"{codec},.* set error_feedback=True"):
            Compression(codec)
    else:
        Compression(codec)
    if facts.is_divergent:
        with pytest.raises(ValueError, match=f"error_feedback: with {codec} it diverges, .* use .* or a finer codec"):
            Compression(codec, error_feedback=True)
    else:
        Compression(codec, error_feedback=True)
    assert (facts.next_finer is None) == facts.is_exact
    if facts.next_finer is not None:
        assert _native.check_codec(facts.next_finer) == facts.next_finer


def test_what_is_known_of_some_codecs():
    known = {
        "is_exact": {"raw"},
        "is_cast": {"raw", "bf16", "fp16"},
        "is_divergent": {"maxmin:1", "hadamard:1"},
        "needs_feedback": {"sign", *(f"topk:{bits}" for bits in range(1, 9))},
        "hides_magnitudes": {"sign"},
        "is_coarse": {"sign", "maxmin:1", "maxmin:2", "absmax:2", "hadamard:1", "hadamard:2"}
        | {f"topk:{bits}" for bits in range(1, 9)},
    }
    old = [
        "raw",
        "bf16",
        "fp16",
        "maxmin",
        "absmax",
        "sign",
        "e4m3",
        "e5m2",
        "mxfp8",
        "mxfp8_e5m2",
        "mxfp4",
        "nvfp4",
        "hadamard",
        "topk",
    ]
    codecs = [codec for row in ROWS if row["name"] in old for codec in variants(row)]
    for question, yes in known.items():
        assert {codec for codec in codecs if getattr(_codecs.facts(codec), question)} == yes, question


def test_an_unknown_codec_is_refused_with_all_that_there_are_and_the_nearest():
    with pytest.raises(ValueError, match="codec: .*unknown codec `maxmim`; .*did you mean `maxmin`") as caught:
        Compression("maxmim:4")
    assert all(row["name"] in str(caught.value) for row in ROWS)
    with pytest.raises(ValueError, match=r"compression \(ACCL_CODEC\): unknown codec `maxmim`"):
        _native.check_option("compression", "maxmim:4")


def test_a_wrong_variable_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setenv("ACCL_CODEC", "maxmim:4")
    assert main(["config"]) == 1
    said = capsys.readouterr().err
    assert "ACCL_CODEC" in said and "did you mean `maxmin`" in said


def test_the_settings_and_the_command_list_every_codec(capsys):
    [setting] = [row for row in _native.config_rows() if row["option"] == "compression"]
    assert main(["codecs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row in ROWS:
        assert row["spelled"] in setting["accepted"] and row["spelled"] in lines
        assert any(row["description"] in line for line in lines)
    assert main(["codecs", "--json"]) == 0
    assert '"needs_feedback": true' in capsys.readouterr().out


def test_what_auto_tries_is_what_the_rows_say():
    assert _codecs.candidates() == [codec for row in ROWS for codec in row["auto"]]
    assert all(_native.check_codec(codec) for codec in _codecs.candidates())
    assert compression.Compression("auto").codec == "auto"
