"""Known gaps of gloo. Read only when the tests run with ACCL_TEST_BACKEND=gloo, which checks the tests themselves.

A row never applies to accl.
"""

import re

_UNKNOWN_DTYPES = r"(?<![a-z])(int16|uint16|uint32|uint64|float8_\w+)(?!\w)"

# (pattern in the names of file and test, pattern in the parameters, reason)
GLOO = [
    ("^test_(arguments|disagreement|lost_peers)", "", "has other classes and sentences, hangs, or ends the process"),
    ("^test_exit.*(ctrl_c|leaving|uncaught)", "", "aborts now and then, and does not look for signals"),
    ("^test_elastic", "", "takes what dead ranks left for living ones"),
    ("detailed_debugging$", "", "ends with a segmentation fault there"),
    ("^test_random_programs", "", "uses the tensors of other ranks as scratch"),
    (
        "^test_group_life.*(timeout|timed_out|error_state|abort|refused_argument|poisoned|copied)",
        "",
        "has no such rules",
    ),
    ("", _UNKNOWN_DTYPES, "does not know the dtype"),
    ("premul", "", "has no PREMUL_SUM"),
    ("premultiplied", "", "has no PREMUL_SUM"),
    ("factor_of_each_rank", "", "has no PREMUL_SUM"),
    ("(average_of_bool|sum_of_float8|bit_operators_on_floats).*refused", "", "refuses with another class"),
    ("average_of_integers|every_operator_and_dtype|exact_block|has_the_exact", r"^$|AVG-u?int", "averages no integers"),
    ("complex_numbers_have_no_order", "", "refuses with another class"),
    ("every_operator_and_dtype|exact_block|has_the_exact", "(AVG|PRODUCT|MIN|MAX)-complex", "reduces no complex"),
    ("(reduce|exact_block)", "complex", "does not reduce complex numbers as such"),
    ("stacked_output|differ_between_ranks|tensors_of_any_size", "", "wants tensors of equal shape"),
    ("", "SUM-bool", "leaves sums of bytes in bool tensors"),
    ("gather_brings_every_dtype", "complex", "does not gather complex numbers"),
    ("reduce_leaves_the_tensors_of_other", "", "uses them as scratch"),
    ("minus_zero_is_below|one_nan_wins|nan_of_any_payload", "", "has no order for them"),
    (
        "strided|flat_forms|negative_view|negative_strided|conjugate_views|memory_formats",
        "",
        "reads raw memory or refuses",
    ),
    ("leaves_other_tags|send_to_itself", "", "blocks until the peer receives"),
    ("barrier_that_times_out", "", "has another sentence and does not recover"),
    ("monitored_barrier_names_the_first", "", "does not recover"),
    ("wait_that_expires|call_that_times_out", "", "has other classes and does not recover"),
    ("version_counter|duration|every_kind_of_call_has_a_future", "", "does not do it"),
    ("memory_falls_after_receives", "", "makes no progress on a receive whose handle was dropped"),
    (
        "callbacks_may_submit_and_block|callbacks_may_block_at_the|callback_that_hangs",
        "",
        "runs callbacks on its two threads",
    ),
    ("1000_live_groups|again_and_again|four_bytes_do_not", "", "has threads and descriptors per group"),
    ("one_event_with_its_title", "(all_to_all|reduce_scatter)", "has another title"),
]


def gloo_gap(nodeid: str) -> str | None:
    """The reason why gloo is not required to pass the test, or None."""
    name, _, parameters = nodeid.rsplit("/", 1)[-1].partition("[")
    rows = (row for row in GLOO if re.search(row[0], name) and re.search(row[1], parameters))
    return next((reason for _, _, reason in rows), None)
