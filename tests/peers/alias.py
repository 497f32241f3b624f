"""A backend name that the stock suite takes for another name.

The suite compares its `BACKEND` with literals ("gloo", "mpi") while its classes are being defined. An `Alias` compares
equal to those literals; its text stays the real name.
"""

from __future__ import annotations


class Alias(str):
    """A string that also equals each of `aliases`, and hashes like the first of them."""

    __slots__ = ("aliases",)
    aliases: tuple[str, ...]

    def __new__(cls, name: str, aliases: tuple[str, ...]) -> Alias:
        self = super().__new__(cls, name)
        self.aliases = aliases
        return self

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (isinstance(other, str) and str(other) in self.aliases)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # `BACKEND in {...}` looks up the hash before it compares, and an object has only one hash.
        return hash(self.aliases[0]) if self.aliases else str.__hash__(self)


def plain(name: object) -> object:
    """The real name as an ordinary string; anything but an alias is returned unchanged."""
    return str.__str__(name) if isinstance(name, Alias) else name
