"""Shows that the checks refuse what they must refuse: a check that cannot fail is useless. Needs only Python."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import itertools
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "python"), str(HERE.parent)]
sys.dont_write_bytecode = True

from peers import compare
from peers.alias import Alias, plain

from benches.against import pairs
from benches.peers import jobs, placement, tables
from benches.peers.report import as_rows
from benches.peers.sections import tcp, two_hosts


def script(name: str, folder: Path = HERE) -> ModuleType:
    """Loads a script as a module: from this folder, or a file of a package whose import as a whole would need torch."""
    loader = importlib.machinery.SourceFileLoader(name, str(folder / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)
    return module


layers = script("check_layers")
shim = script("check_shim")
factories = script("check_factories")
planter = script("mutants")
messages = script("check_messages")
prose = script("prose")
plain_text = sys.modules["plain_text"]
python_imports = sys.modules["python_imports"]
words = sys.modules["word_table"]
cover = script("cover.py", HERE.parent / "tests" / "support")


def package(name: str, *dependencies: tuple[str, str | None]) -> dict[str, Any]:
    return {"name": name, "dependencies": [{"name": target, "kind": kind} for target, kind in dependencies]}


class Mutants(unittest.TestCase):
    def test_every_defect_can_be_planted(self) -> None:
        mutants = planter.mutants()
        self.assertGreaterEqual(len(mutants), 20)
        self.assertEqual(len({mutant["name"] for mutant in mutants}), len(mutants))
        for mutant in mutants:
            sound = (HERE.parent / mutant["file"]).read_text()
            self.assertNotEqual(planter.planted(sound, mutant), sound)

    def test_a_place_that_has_gone_is_named(self) -> None:
        mutant = {"name": "lost", "file": "a.rs", "old": "not there", "new": ""}
        with self.assertRaisesRegex(ValueError, "lost: its text occurs 0 times in a.rs, expected once"):
            planter.planted("fn main() {}", mutant)

    def test_rows_of_defects_that_did_not_run_stay(self) -> None:
        page = "| a | accl-x | 1 s | old |\n| b | accl-x | 2 s | old |\n| gone | accl-x | 3 s | old |\n"
        rows = planter.merged(page, {"b": "| b | new |", "c": "| c | new |"}, ["c", "a", "b", "d"])
        self.assertEqual(rows, ["| c | new |", "| a | accl-x | 1 s | old |", "| b | new |"])


class Words(unittest.TestCase):
    TABLE: dict[str, Any] = {"word": [{"find": "told|tells?", "names": ["told", "tell"], "use": "notify"}]}

    def found(self, path: str, source: str, **table: Any) -> list[str]:
        used: set[int] = set()
        both = self.TABLE | table
        texts = [*plain_text.of_file(path, source), *self.messages(path, source)]
        return [*words.check(texts, both, used), *words.unused(both, used)]

    def messages(self, path: str, source: str) -> list[Any]:
        return [] if path.endswith((".md", ".toml")) else list(plain_text.messages(path, source))

    def test_a_word_of_the_table_is_refused_with_the_fields_word(self) -> None:
        for path, source in (
            ("a.rs", "fn f() {} // The peer is told.\n"),
            ("a.rs", "/// Rank that tells others.\nfn f() {}\n"),
            ("a.py", "# A rank tells.\n"),
            ("a.py", 'def f():\n    """Tell the peer."""\n'),
            ("a.md", "The rank is told.\n"),
            ("a.toml", "# A rank tells.\n"),
        ):
            with self.subTest(source):
                (line,) = self.found(path, source)
                self.assertRegex(line, rf"^{path}:[12]: `[Tt]\w+` in .*: write notify$")

    def test_a_word_in_a_message_is_refused(self) -> None:
        for path, source in (
            ("a.rs", 'let text = format!("rank {rank} is told \\\n    of the end");\n'),
            ("a.rs", 'let text = r#"a rank tells the others"#;\n'),
            ("a.cpp", 'throw Error("the peer was told of it");\n'),
            ("a.py", 'raise ValueError(f"rank {rank} is told of it")\n'),
            ("a.py", 'text = ("the peer "\n    "is told of it")\n'),
        ):
            with self.subTest(source):
                (line,) = self.found(path, source)
                self.assertIn("write notify", line)

    def test_short_strings_code_and_quoted_names_are_data(self) -> None:
        for path, source in (
            ("a.rs", 'let x = "told"; // The field `told` is set.\n'),
            ("a.py", 'x = "told: yes"  # See `told`.\n'),
            ("a.py", 'def f():\n    """Returns it."""\n    return "a field named `told` is set"\n'),
            ("a.md", "```\nis told\n```\n"),
        ):
            with self.subTest(source):
                self.assertEqual(self.found(path, source), [])

    def test_a_word_in_a_name_is_refused_and_a_part_of_a_word_is_not(self) -> None:
        for path, source, wrong in (
            ("a.rs", "fn told_by(x: u8) {} // told\n", ["told_by"]),
            ("a.rs", 'struct HasTold; let stolder = "told";\n', ["HasTold"]),
            ("a.cpp", "void tell_peer();\nvoid tell_peer();\n", ["tell_peer"]),
            ("a.py", "def tell():\n    x.told = TELL_AFTER\n", ["tell", "told", "TELL_AFTER"]),
        ):
            with self.subTest(source):
                lines = list(words.check_names(plain_text.names(path, source), self.TABLE, set()))
                self.assertEqual(len(lines), len(wrong), lines)
                for name, line in zip(wrong, lines):
                    self.assertRegex(line, rf"^{path}:\d: the name `{name}` has the word `\w+`: use notify$")

    def test_an_exception_holds_for_its_text_alone_and_is_removed_when_nothing_needs_it(self) -> None:
        exception = [{"path": "a.md", "text": "is told apart", "why": "a test"}]
        self.assertEqual(self.found("a.md", "It is told apart.\n", exception=exception), [])
        self.assertRegex(
            "\n".join(self.found("a.md", "It is told.\n", exception=exception)), "write notify\n.*remove it"
        )


class Prose(unittest.TestCase):
    def pages(self, *paragraphs: str) -> str:
        return "\n".join(prose.check_pages(plain_text.of_file("a.md", "\n\n".join(paragraphs) + "\n")))

    def test_long_sentences_and_paragraphs_of_a_page_are_refused(self) -> None:
        self.assertRegex(self.pages("word " * 41 + "end."), "a.md:1: a sentence of 42 words")
        self.assertRegex(self.pages("A short one. " * 27 + "End."), "a.md:1: a paragraph of 82 words")
        self.assertRegex(self.pages("word " * 26 + "end.", "Short."), "1 of 2 sentences have more than 25 words")
        self.assertEqual(
            self.pages("word " * 24 + "end.", "| " + "cell " * 90 + "|", "```\n" + "code " * 90 + "\n```"), ""
        )

    def test_a_doc_comment_that_no_noun_or_verb_begins_is_refused(self) -> None:
        for source, count in (
            ("/// Of the peer.\nx: u32,\n", 1),
            ("/// Index of the peer.\nx: u32,\n", 0),
            ("// What follows is plain code.\n", 0),
            ("// SAFETY: as above.\n", 1),
            ("// SAFETY: `dst` holds `len` bytes.\n", 0),
        ):
            with self.subTest(source):
                self.assertEqual(len(list(prose.check_comments(plain_text.of_file("a.rs", source)))), count)

    def test_a_comment_that_is_too_wide_is_refused(self) -> None:
        sources = {"a.rs": "// " + "x" * 148 + "\n// " + "x" * 147 + "\nlet code = " + "x" * 200}
        self.assertEqual(list(prose.check_width(sources)), ["a.rs:1: 151 columns; at most 150"])

    def test_a_misspelt_word_is_refused_and_names_of_the_program_are_not_looked_at(self) -> None:
        if not prose.codespell():
            self.skipTest("codespell is not installed")
        wrong = "adr" + "ess"
        texts = list(plain_text.of_file("a.md", f"First.\n\nThe {wrong} of `{wrong}`.\n"))
        (line,) = prose.check_spelling(texts)
        self.assertRegex(line, "^a.md:3: .* ==> address")


class Messages(unittest.TestCase):
    def breaches(self, message: str) -> str:
        return "\n".join(messages.breaches({"0123456789abcdef": message}))

    def test_a_path_of_one_machine_is_refused(self) -> None:
        for message in (
            "Merge /tmp/w/dev",
            "Merge branch 'main' of /home/someone/torch-accl",
            "ci: faster\n\nMeasured in /work/main/target.",
        ):
            with self.subTest(message):
                self.assertRegex(self.breaches(message), "0123456789ab: the message names /")

    def test_paths_of_the_repository_and_of_every_linux_are_accepted(self) -> None:
        for message in (
            "ci: look at .ci/run and tests/tmp/x",
            "engine: read /proc/self/status and /sys/class/net",
            "and/or",
        ):
            with self.subTest(message):
                self.assertEqual(self.breaches(message), "")

    def test_new_messages_are_free_of_them(self) -> None:
        self.assertEqual(list(messages.breaches(messages.new_messages())), [])


class Cover(unittest.TestCase):
    CASES = [
        dict(zip(("op", "dtype", "world", "layout"), values, strict=True))
        for values in itertools.product(range(7), range(12), range(3), range(2))
        if values[:2] != (6, 11)
    ]

    def test_a_part_has_every_pair_of_values_and_few_cases(self) -> None:
        def pairs(cases: list[dict[str, int]]) -> set[Any]:
            return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}

        for seed in range(3):
            part = [self.CASES[index] for index in cover.covering(self.CASES, 2, seed)]
            self.assertEqual(pairs(part), pairs(self.CASES))
            # Two parameters alone have 7 times 12 pairs but one.
            self.assertLessEqual(83, len(part))
            self.assertLess(len(part), 110)

    def test_a_part_of_single_values_is_as_large_as_the_largest_parameter(self) -> None:
        part = [self.CASES[index] for index in cover.covering(self.CASES, 1, 5)]
        self.assertEqual({case["op"] for case in part}, set(range(7)))
        self.assertEqual({case["dtype"] for case in part}, set(range(12)))
        self.assertEqual(len(part), 12)

    def test_seeds_choose_other_cases(self) -> None:
        self.assertNotEqual(cover.covering(self.CASES, 2, 1), cover.covering(self.CASES, 2, 2))

    def test_each_slow_test_has_its_turn(self) -> None:
        class Item:
            def __init__(self, number: int) -> None:
                self.nodeid = f"tests/test_a.py::test_{number}"

            def get_closest_marker(self, name: str) -> bool:
                return name == "slow" and self.nodeid[-1] not in "06"

        items = [Item(number) for number in range(20)]
        run = [cover.select(items, "pairs", seed)[0] for seed in range(6)]
        self.assertEqual(set(items), {item for part in run for item in part})
        # Each part has two or three of the 16 slow tests, and all four others.
        self.assertEqual({len(part) for part in run}, {6, 7})
        self.assertEqual(len(cover.select(items, "values", 0)[0]), 4)
        self.assertEqual(cover.select(items, "all", 0), (items, []))

    def test_a_slow_test_has_its_turn_whatever_part_of_a_matrix_is_chosen(self) -> None:
        def item(nodeid: str, **more: Any) -> Any:
            path = Path("tests/test_a.py")
            return SimpleNamespace(nodeid=nodeid, path=path, get_closest_marker=lambda name: name == "slow", **more)

        cases = [dict(enumerate(values)) for values in itertools.product(range(4), repeat=4)]
        self.assertGreater(len({len(cover.covering(cases, 2, seed)) for seed in range(6)}), 1)
        matrix = [item(f"a[{index}]", callspec=SimpleNamespace(indices=case)) for index, case in enumerate(cases)]
        plain = [item(f"b_{number}") for number in range(12)]
        for items in (matrix + plain, plain + matrix[::-1]):
            run = [cover.select(items, "pairs", seed)[0] for seed in range(6)]
            for each in plain:
                self.assertEqual(sum(each in part for part in run), 1, each.nodeid)


class PeersArguments(unittest.TestCase):
    def test_a_folder_for_the_page_is_made(self) -> None:
        from benches.peers import arguments

        with tempfile.TemporaryDirectory() as parent:
            wanted = Path(parent, "a", "b")
            self.assertEqual(arguments.parse(["--output", str(wanted)]).output, wanted)
            self.assertTrue(wanted.is_dir())
            Path(parent, "file").touch()
            with self.assertRaises(SystemExit), redirect_stderr(io.StringIO()) as said:
                arguments.parse(["--output", str(Path(parent, "file"))])
            self.assertIn("cannot create folder", said.getvalue())


class Against(unittest.TestCase):
    def test_the_median_lies_between_the_two_values_in_19_of_20_draws_or_more(self) -> None:
        # From tables of the sign test: the 10th and the 22nd of 31, the 2nd and the 8th of 9, all of 5.
        self.assertEqual(pairs.interval([float(value) for value in range(31, 0, -1)]), (10.0, 22.0))
        self.assertEqual(pairs.interval([float(value) for value in range(1, 10)]), (2.0, 8.0))
        self.assertEqual(pairs.interval([3.0, 1.0, 2.0, 5.0, 4.0]), (1.0, 5.0))

    def test_only_a_case_that_is_surely_slower_is_a_loss(self) -> None:
        row = {"case": "c", "here_ns": 1.0, "there_ns": 1.0, "ratio": 1.04, "low": 1.03, "high": 1.05}
        self.assertIn("loss", pairs.line(row))
        self.assertNotIn("loss", pairs.line({**row, "low": 1.01}))
        self.assertIn("gain", pairs.line({**row, "low": 0.9, "high": 0.99}))


class Layers(unittest.TestCase):
    def test_an_arrow_that_points_up_is_refused(self) -> None:
        crates = [package("accl-types"), package("accl-schedule", ("accl-engine", None)), package("accl-engine")]
        self.assertRegex("\n".join(layers.arrows(crates)), r"accl-schedule -> accl-engine \(normal\)")

    def test_an_arrow_that_points_down_is_accepted(self) -> None:
        crates = [package("accl-types"), package("accl-kernels", ("accl-types", None), ("half", None))]
        self.assertEqual(list(layers.arrows(crates)), [])

    def test_the_testkit_is_for_tests_only(self) -> None:
        crates = [package("accl-testkit"), package("accl-engine", ("accl-testkit", "dev"))]
        self.assertEqual(list(layers.arrows(crates)), [])
        crates = [package("accl-testkit"), package("accl-engine", ("accl-testkit", None))]
        self.assertEqual(len(list(layers.arrows(crates))), 1)

    def test_a_long_file_says_why(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "big.rs"
            path.write_text("//! A file.\n" + "fn f() {}\n" * 600)
            [problem] = layers.long_files("accl-types", Path(folder))
            self.assertIn("accl-types/src/big.rs: 601 lines (at most 600); split it", problem)
            path.write_text("//! A file.\n//!\n//! This file is long because of a table.\n" + "fn f() {}\n" * 600)
            self.assertEqual(list(layers.long_files("accl-types", Path(folder))), [])

    def test_a_fifth_type_of_a_name_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "accl-types" / "src"
            source.mkdir(parents=True)
            for number in range(4):
                (source / f"f{number}.rs").write_text("pub(crate) struct State {}\n")
            # Types of tests and associated types do not count.
            (source / "other.rs").write_text("#[cfg(test)]\nstruct State;\nimpl A for B {\n    type State = u8;\n}\n")
            self.assertEqual(list(layers.shared_names([source])), [])
            (source / "other.rs").write_text("enum State { A }\n")
            [problem] = layers.shared_names([source])
            self.assertIn("5 types have the name State, and at most 4 may: rename one of accl-types/f0.rs", problem)

    def test_the_engine_may_neither_use_nor_name_an_offload(self) -> None:
        crates = [package("accl-cclo"), package("accl-engine", ("accl-cclo", None))]
        self.assertRegex("\n".join(layers.arrows(crates)), r"accl-engine -> accl-cclo \(normal\)")
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder)
            (source / "a.rs").write_text('// MPI in a comment\nfn compile() {}\nconst NAME: &str = "mpi";\n')
            [problem] = layers.named("accl-engine", source)
            self.assertRegex(problem, r"^accl-engine/src/a.rs:3: the code names `mpi`; put .* into its crate")
            self.assertEqual(list(layers.named("accl-library", source)), [])

    def test_python_below_the_top_is_refused(self) -> None:
        self.assertEqual(len(list(layers.arrows([package("accl-engine", ("pyo3", None))]))), 1)

    def test_an_unknown_crate_is_refused(self) -> None:
        self.assertEqual(len(list(layers.arrows([package("accl-new")]))), 1)

    def test_unsafe_code_stands_where_the_table_has_it_and_nowhere_else(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "src"
            source.mkdir()
            (source / "lib.rs").write_text("#![forbid(unsafe_code)]\n")
            crate = {"name": "accl-new", "manifest_path": str(Path(folder) / "Cargo.toml")}
            self.assertEqual(list(layers.unsafe_places([crate])), [])
            (source / "new.rs").write_text("// unsafe in a comment\nfn f() { unsafe { g() } }\n")
            self.assertRegex("\n".join(layers.unsafe_places([crate])), r"^accl-new/src/new.rs: unsafe code outside")
            (source / "lib.rs").write_text("")
            (source / "new.rs").write_text("")
            self.assertRegex("\n".join(layers.unsafe_places([crate])), r"lib.rs lacks #!\[forbid")
            layers.MAY_BE_UNSAFE["accl-new"] = {"new"}
            try:
                self.assertRegex("\n".join(layers.unsafe_places([crate])), r"new has no unsafe code; take it out")
            finally:
                del layers.MAY_BE_UNSAFE["accl-new"]

    def test_a_clock_in_a_pure_crate_is_refused_outside_tests(self) -> None:
        text = "use std::time::Instant;\n// std::env is fine in a comment\n#[cfg(test)]\nmod t { use std::env; }\n"
        self.assertEqual(len(list(layers.impure_lines(text, "lib.rs"))), 1)

    def test_a_lock_in_a_pure_crate_is_refused(self) -> None:
        for text in ("use std::sync::{Arc, Mutex};\n", "use parking_lot::Condvar;\n"):
            self.assertEqual(len(list(layers.impure_lines(text, "lib.rs"))), 1)

    def circles(self, **files: str) -> list[str]:
        modules = {tuple(name.split("_")) if name != "lib" else (): text for name, text in files.items()}
        return list(layers.circles("accl-x", layers.imports_of(modules)))

    def test_a_circle_of_files_is_found_through_groups_names_passed_on_and_paths_in_code(self) -> None:
        [circle] = self.circles(a="use crate::{b::B, c};", b="fn f() { crate::a::g() }", c="")
        self.assertIn("circle: a, b", circle)
        passed_on = {"lib": "mod a; mod b; pub use b::B;", "a": "use crate::B;", "b": "use super::a::A;"}
        self.assertEqual(len(self.circles(**passed_on)), 1)
        table = {"t": "mod row; const ROWS: &[u8] = &[row::ROW];", "t_row": "use super::Kind;"}
        self.assertEqual(len(self.circles(**table)), 1)

    def test_code_behind_an_item_of_tests_counts_and_the_item_does_not(self) -> None:
        for item in (
            "#[cfg(test)]\nmod tests;",
            "#[cfg(test)] mod tests;",
            "#[cfg(all(test, not(x)))]\nfn f() {\n  { crate::c::g() }\n}",
        ):
            circle = self.circles(a=f"{item}\nuse crate::b::B;", b="use crate::a::A;", c="use crate::a::A;")
            self.assertEqual(len(circle), 1, item)
            self.assertIn("circle: a, b", circle[0])
            self.assertEqual(len(list(layers.impure_lines(f"{item}\nuse std::env;", "lib.rs"))), 1, item)

    def test_files_without_a_circle_are_accepted(self) -> None:
        self.assertEqual(self.circles(a="use crate::b::B;", b="use std::fmt;", lib="mod a; mod b; pub use a::A;"), [])
        self.assertEqual(self.circles(t="mod row; pub use kind::Kind;", t_row="use super::Kind;", t_kind=""), [])

    def test_a_folder_may_not_name_one_that_is_not_below_it(self) -> None:
        run = "use crate::plan::Plan;\nuse crate::driver::Driver;"
        modules = {("exec", "run"): run, ("plan",): "", ("driver",): ""}
        problems = list(layers.climbs("accl-executor", layers.imports_of(modules)))
        self.assertEqual(len(problems), 2)
        self.assertIn("exec/run imports driver", problems[0])
        upwards = {("plan",): "use crate::exec::run::Run;", ("exec", "run"): ""}
        self.assertEqual(len(list(layers.climbs("accl-executor", layers.imports_of(upwards)))), 1)
        planted = {
            ("driver", "waiting"): "use crate::session::create::refuse_group;",
            ("session", "create"): "",
            ("new",): "",
        }
        problems = "\n".join(layers.climbs("accl-engine", layers.imports_of(planted)))
        self.assertIn("driver/waiting imports session/create, which is above it", problems)
        self.assertIn("new has no place in the order", problems)


class PythonLayers(unittest.TestCase):
    ORDER = {"python": ["x"], "python/x": ["high", "low"], "python/x/high": ["a", "b"], "python/x/low": ["c", "d"]}
    FILES = ("__init__", "high/__init__", "high/a", "high/b", "low/__init__", "low/c", "low/d")

    def breaches(self, exempt: dict[str, str] | None = None, **texts: str) -> list[str]:
        sources = {("x", *file.split("/")): "" for file in self.FILES}
        sources |= {("x", *name.replace("_0_", "/").split("/")): text for name, text in texts.items()}
        return list(python_imports.breaches(sources, self.ORDER, exempt or {}))

    def test_an_upward_import_is_refused_however_it_is_written(self) -> None:
        for text in (
            "import os\nfrom ..high import a",
            "import os\nfrom ..high.a import A",
            "import os\nimport x.high.a",
            "import os\nfrom x.high.a import A",
            "def f():\n    from ..high.a import A",
            "try:\n    from ..high import a\nexcept ImportError: pass",
            'def f():\n    return import_module("..high.a", __package__)',
            "if TYPE_CHECKING: import os\nelse: from ..high import a",
        ):
            with self.subTest(text):
                [problem] = self.breaches(low_0_c=text)
                self.assertRegex(
                    problem, r"^python/x/low/c.py:2: imports x/high/a, which is above it; move the code that"
                )
        [problem] = self.breaches(low_0_c="from ..high import A")
        self.assertIn("c.py:1: imports x/high/__init__, which is above it", problem)
        [problem] = self.breaches(high_0_b="from . import a")
        self.assertIn("b.py:1: imports x/high/a, which is above it", problem)

    def test_downward_imports_and_those_for_types_are_accepted(self) -> None:
        down = "from . import b\nfrom .b import B\nfrom .. import low\nfrom ..low.c import C\nimport os, torch.high"
        types = "if TYPE_CHECKING:\n    from ..high import a\nif typing.TYPE_CHECKING:\n    from x import high"
        face = "from . import high\nfrom .low.c import C"
        self.assertEqual(self.breaches(high_0_a=down, low_0_c=types, __init__=face, __main__="from . import main"), [])

    def test_a_circle_is_refused_with_its_files(self) -> None:
        [problem] = self.breaches(
            high_0_a="from .b import B", high_0_b="from ..low.c import C", low_0_c="import x.high.a"
        )
        self.assertRegex(
            problem,
            r"^python/x/low/c.py:1: imports x/high/a in a circle: x/low/c -> x/high/a -> x/high/b -> x/low/c; move the code that "
            "both need to a file below them$",
        )

    def test_a_file_may_not_import_the_init_of_its_own_folder(self) -> None:
        for text in ("from . import name", "from .. import name", "import x"):
            with self.subTest(text):
                [problem] = self.breaches(low_0_d=text)
                self.assertRegex(
                    problem, r"^python/x/low/d.py:1: imports x/.*, which is above all .*; import from the file"
                )

    def test_an_exemption_holds_for_its_import_alone_and_is_removed_when_nothing_needs_it(self) -> None:
        exempt = {"x/low/c -> x/high/a": "a test"}
        self.assertEqual(self.breaches(exempt, low_0_c="from ..high import a"), [])
        [problem] = self.breaches(exempt, low_0_c="from ..high import a, b")
        self.assertIn("imports x/high/b", problem)
        [problem] = self.breaches(exempt)
        self.assertIn("x/low/c -> x/high/a: not an upward import; remove it from PYTHON_EXEMPT", problem)

    def test_a_file_without_a_place_and_a_place_without_a_file_are_refused(self) -> None:
        [problem] = self.breaches(low_0_new="")
        self.assertRegex(problem, r"^python/x/low/new: no place in PYTHON_ORDER of .ci/check_layers; give it one")
        order = {**self.ORDER, "python/x/low": ["c", "d", "gone"]}
        sources = {("x", *file.split("/")): "" for file in self.FILES}
        [problem] = python_imports.breaches(sources, order, {})
        self.assertRegex(problem, r"^python/x/low/gone: no such file; remove it from PYTHON_ORDER")

    def test_faults_planted_in_the_package_are_refused(self) -> None:
        sources = python_imports.sources_in(HERE.parent)
        self.assertEqual(list(python_imports.breaches(sources, layers.PYTHON_ORDER, layers.PYTHON_EXEMPT)), [])
        for file, line, wanted in (
            ("compression/_scope", "from ..compat import ccl", "imports torch_accl/compat/ccl, which is above it"),
            ("_options", "from torch_accl import Backend", "imports torch_accl/__init__, which is above all files"),
            (
                "layer_parallel/_solve/batch",
                "from .walk import run_program",
                "imports torch_accl/layer_parallel/_solve/walk in a circle: ",
            ),
        ):
            with self.subTest(file):
                key = ("torch_accl", *file.split("/"))
                planted = {**sources, key: f"{sources[key]}{line}\n"}
                [problem] = python_imports.breaches(planted, layers.PYTHON_ORDER, layers.PYTHON_EXEMPT)
                number = planted[key].count("\n")
                self.assertTrue(problem.startswith(f"python/torch_accl/{file}.py:{number}: {wanted}"), problem)

    def test_a_facade_that_imports_an_internal_file_is_refused(self) -> None:
        sources = python_imports.sources_in(HERE.parent)
        self.assertEqual(list(python_imports.intrusions(sources, layers.PYTHON_FACADES)), [])
        for file, line in (
            ("compat/cgx", "from ..compression._scope import FLOATS"),
            ("compat/torchbraid/_root", "from ...layer_parallel._net import tree"),
            ("compat/torchbraid/_root", "import torch_accl.layer_parallel._ranks.wire"),
        ):
            with self.subTest(line):
                key = ("torch_accl", *file.split("/"))
                planted = {**sources, key: f"{sources[key]}{line}\n"}
                [problem] = python_imports.intrusions(planted, layers.PYTHON_FACADES)
                self.assertRegex(
                    problem, r"^python/torch_accl/compat/.*: imports torch_accl/.*, which is internal; import from"
                )


class Shim(unittest.TestCase):
    def breaches(self, code: str, name: str = "cpp_shim/a.cpp") -> str:
        return "\n".join(shim.check({name: f"// A file.\n{code}"}))

    def test_one_line_more_than_the_limit_is_refused(self) -> None:
        self.assertEqual(list(shim.check({"cpp_shim/a.cpp": "//\n" * shim.LINES})), [])
        [problem] = shim.check({"cpp_shim/a.cpp": "//\n" * shim.LINES, "cpp_shim/b.h": "//\n"})
        self.assertRegex(
            problem, rf"^cpp_shim/: {shim.LINES + 1} lines, more than {shim.LINES}; move decisions into Rust"
        )

    def test_only_the_unit_of_accelerators_copies_and_it_has_a_limit_of_its_own(self) -> None:
        copy = "void f(at::Tensor t) { t.copy_(t); }"
        self.assertEqual(self.breaches(copy, f"cpp_shim/{shim.COPYING_UNIT}.cpp"), "")
        self.assertIn("copies payload", self.breaches(copy))
        for unit, limit in shim.UNIT_LINES.items():
            self.assertEqual(list(shim.check({f"cpp_shim/{unit}.h": "//\n" * limit})), [])
            [problem] = shim.check({f"cpp_shim/{unit}.h": "//\n" * limit, f"cpp_shim/{unit}.cpp": "//\n"})
            self.assertRegex(problem, rf"^cpp_shim/{unit}: {limit + 1} lines, more than {limit}")

    def test_each_forbidden_thing_is_found(self) -> None:
        for code in (
            'auto v = std::getenv("X");',
            "std::thread t(run);",
            "std::cout << 1;",
            'printf("x");',
            "TORCH_WARN(1);",
            "signal(SIGINT, handler);",
            "exit(1);",
            "std::abort();",
            "static int count = 0;",
            "  static std::vector<int> live;",
            "thread_local int x;",
            "std::memcpy(a, b, n);",
            "auto d = t.contiguous();",
            "try { f(); } catch (...) {}",
            "#include <torch/extension.h>",
            "#if TORCH_VERSION_MINOR >= 14",
        ):
            with self.subTest(code):
                self.assertNotEqual(self.breaches(code), "")

    def test_what_it_may_is_accepted(self) -> None:
        for code in (
            "// getenv, std::thread",
            'TORCH_CHECK(false, "exit(1) and std::cout");',
            "TORCH_WARN_ONCE(1);",
            "static constexpr int kTags = 3;",
            "static c10::intrusive_ptr<Work> make(int a) { return x; }",
            "static_assert(sizeof(int) == 4);",
            "void abort() override { bridge_->abort(); }",
            "work->abort();",
            "std::mutex mutex_;",
            "try { f(); } catch (...) { /* the message above stands */ }",
        ):
            with self.subTest(code):
                self.assertEqual(self.breaches(code), "")

    def test_a_second_mutex_is_refused(self) -> None:
        self.assertIn("2 mutexes", self.breaches("std::mutex a_;\nstd::mutex b_;\n"))

    def test_a_file_says_what_it_owns(self) -> None:
        self.assertIn(
            "does not begin with a comment that states what it owns",
            "\n".join(shim.check({"cpp_shim/a.h": "#pragma once\n"})),
        )

    def test_units_that_include_one_another_in_a_circle_are_named(self) -> None:
        def files(**uses: str) -> str:
            texts = {f"cpp_shim/{name}": f'// A file.\n#include "{used}"\n' for name, used in uses.items()}
            texts = {name.replace("_dot_", "."): text for name, text in texts.items()}
            return "\n".join(shim.check(texts))

        self.assertEqual(files(a_dot_h="b.h", b_dot_h="torch.h", a_dot_cpp="a.h", c_dot_cpp="a.h"), "")
        circle = files(a_dot_h="b.h", b_dot_h="torch.h", b_dot_cpp="a.h", c_dot_cpp="a.h")
        self.assertIn("in a circle: a, b", circle)

    def test_versions_belong_in_one_header(self) -> None:
        self.assertEqual(self.breaches("#if TORCH_VERSION_MINOR >= 14", "cpp_shim/torch_compat.h"), "")


class Factories(unittest.TestCase):
    def breaches(self, code: str) -> list[str]:
        return list(factories.check({"a.py": f"import torch\n{code}\n"}))

    def test_a_call_that_takes_a_default_of_torch_is_refused_with_its_line_and_what_it_lacks(self) -> None:
        for code, lacks in {
            "torch.zeros(2)": "dtype= and device=",
            "torch.tensor([1], dtype=torch.int64)": "device=",
            "torch.arange(3, device='cpu')": "dtype=",
            "def f(size):\n    return [torch.rand(size, device=None, dtype=torch.float32)]": "device=",
            "torch.as_tensor(array, device='cpu')": "dtype=",
            "torch.randn(2, generator=torch.Generator(), **options)": "dtype= and device=",
            "torch.fft.fftfreq(8, dtype=torch.float32)": "device=",
            "import torch as t\nt.full((2,), 1)": "dtype= and device=",
        }.items():
            with self.subTest(code):
                line = 2 + code.count("\n")
                [found] = self.breaches(code)
                self.assertIn(f"a.py:{line}: torch.", found)
                self.assertIn(f"without {lacks} takes torch's default", found)

    def test_other_ways_to_a_default_are_refused(self) -> None:
        for code in (
            "torch.Tensor([1])",
            "torch.FloatTensor(2)",
            "from torch import zeros",
            "map(torch.tensor, lists)",
        ):
            with self.subTest(code):
                self.assertEqual(len(self.breaches(code)), 1)

    def test_what_depends_on_no_default_is_accepted(self) -> None:
        for code in (
            "torch.zeros(2, dtype=torch.int64, device='cpu')",
            "torch.empty(size, device=x.device, dtype=x.dtype)",
            "torch.zeros_like(x), x.new_zeros(2), x.new_tensor([1])",
            "torch.frombuffer(data, dtype=torch.uint8), torch.from_numpy(array)",
            "import functools\ndef zeros(x: torch.Tensor): return x.zeros",
            "torch.Generator(), torch.get_default_dtype(), isinstance(x, torch.Tensor)",
            "numpy.zeros(2), zeros(2), self.torch.zeros(2)",
        ):
            with self.subTest(code):
                self.assertEqual(self.breaches(code), [])


class Peers(unittest.TestCase):
    def test_an_alias_equals_its_aliases_and_keeps_its_text(self) -> None:
        name = Alias("accl", ("gloo", "mpi"))
        self.assertTrue(name == "gloo" and name == "mpi" and name == "accl" and name == "gloo")
        self.assertFalse(name != "mpi")
        self.assertTrue(name != "nccl")
        self.assertIn(name, {"nccl", "gloo"})
        self.assertEqual(name.upper(), "ACCL")
        self.assertIs(type(plain(name)), str)
        self.assertNotEqual(plain(name), "gloo")

    def run_of(self, backend: str, **tests: str) -> dict[str, Any]:
        found = {name: {"outcome": outcome, "seconds": 0, "reason": ""} for name, outcome in tests.items()}
        setting = {"torch": "2.15.0", "direct_monitored_barrier": False}
        return {"backend": backend, "world": 2, "gpus": 0, "whole": False, "tests": found, **setting}

    def test_a_test_that_gloo_passes_may_not_be_lost(self) -> None:
        gloo = self.run_of("gloo", test_a="pass", test_b="skip")
        self.assertEqual(compare.judge(self.run_of("accl", test_a="pass", test_b="pass"), gloo).bad, [])
        self.assertEqual(len(compare.judge(self.run_of("accl", test_a="skip", test_b="pass"), gloo).bad), 1)

    def test_a_known_failure_is_no_loss_and_a_new_one_is(self) -> None:
        known = self.run_of("accl", test_ddp_logging_data_cpu="error")
        gloo = self.run_of("gloo", test_ddp_logging_data_cpu="pass")
        self.assertEqual(compare.judge(known, gloo).bad, [])
        self.assertEqual(len(compare.judge(self.run_of("accl", test_c="timeout"), None).bad), 1)

    def test_a_refusal_by_name_is_known_only_where_torch_refuses(self) -> None:
        run = self.run_of("accl", test_monitored_barrier_gloo="error")
        old, new, direct = {"torch": "2.13.0+cpu"}, {"torch": "2.14.1"}, {"direct_monitored_barrier": True}
        for setting, bad in ((old, 0), (new, 1), (old | direct, 1)):
            with self.subTest(setting):
                self.assertEqual(len(compare.judge(run | setting, None).bad), bad)

    def test_counts_off_the_target_fail_a_whole_run(self) -> None:
        run = self.run_of("accl", test_a="pass") | {"whole": True}
        self.assertEqual(len(compare.judge(run, None).bad), 1)


class Bars(unittest.TestCase):
    def test_rounding_never_meets_a_bar(self) -> None:
        self.assertEqual(str(tables.Target(0.70001, at_most=0.7)), "0.701 (≤ 0.7) **missed**")
        self.assertEqual(str(tables.Target(19.999, at_least=20)), "19.9 (≥ 20) **missed**")
        self.assertEqual(str(tables.Target(0.7, at_most=0.7)), "0.7 (≤ 0.7) met")

    def test_what_was_not_measured_is_neither_met_nor_missed(self) -> None:
        self.assertIsNone(tables.Target(None, at_most=1).met)
        self.assertIsNone(tables.ratio(1, None))

    def test_placements_are_distinguished(self) -> None:
        found = placement.clusters_of([60, 200, 62, 61, 210, 58])
        self.assertEqual([round(one.ns) for one in found], [60, 205])
        self.assertTrue(found[0].has(70) and not found[0].has(205))

    def test_a_host_is_recognised_by_prefix_and_environment(self) -> None:
        host = jobs.Host(("ip", "netns", "exec", "a"), {"X": "1"})
        self.assertEqual(host.command(["rank", "0"]), ["ip", "netns", "exec", "a", "env", "X=1", "rank", "0"])
        self.assertEqual(jobs.HERE[0].command(["rank"]), ["rank"])

    def test_a_network_that_cannot_be_made_leaves_every_bar_open(self) -> None:
        for section in (*tcp.ALL, *two_hosts.ALL):
            with self.subTest(section.name):
                targets = [target for table in section.tables(as_rows([])) for target in table.targets]
                self.assertEqual({target.met for target in targets}, {None})


if __name__ == "__main__":
    unittest.main()
