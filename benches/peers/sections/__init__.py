"""The parts of the page, in its order. A new one is a file here and a row of `SECTIONS`."""

from __future__ import annotations

from ..report import Section
from . import all_reduce

SECTIONS: tuple[Section, ...] = (all_reduce.SECTION,)
BY_NAME = {section.name: section for section in SECTIONS}
