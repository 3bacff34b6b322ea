"""Replaces a piece of a function, found by its syntax tree. Layout, comments and renamed variables do not matter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = {
    (ast.Name, "id"),
    (ast.Attribute, "attr"),
    (ast.arg, "arg"),
    (ast.keyword, "arg"),
    (ast.ExceptHandler, "name"),
    (ast.FunctionDef, "name"),
    (ast.AsyncFunctionDef, "name"),
}
"""The fields of a syntax tree with a name that a person may change without changing what the code does."""
ENOUGH = 0.5
"""The share of names that have to be the same, so that no other code of the same form is replaced."""


@dataclass
class Likeness:
    """A piece of code with the form of the searched piece, and which names differ in it."""

    renamed: dict[str, str] = field(default_factory=dict)
    same: int = 0
    names: int = 0

    @property
    def share(self) -> float:
        """The share of names that are the same."""
        return self.same / self.names if self.names else 1.0

    def matches(self, wanted: Any, there: Any) -> bool:
        """Return whether two trees have the same form, and each name of the first has one counterpart in the second."""
        if isinstance(wanted, list):
            return isinstance(there, list) and len(wanted) == len(there) and all(map(self.matches, wanted, there))
        if not isinstance(wanted, ast.AST):
            return type(wanted) is type(there) and bool(wanted == there)
        return type(wanted) is type(there) and all(
            self._same_name(getattr(wanted, name), getattr(there, name))
            if (type(wanted), name) in NAMES
            else self.matches(getattr(wanted, name, None), getattr(there, name, None))
            for name in wanted._fields
            if name not in ("ctx", "type_comment", "kind")
        )

    def _same_name(self, wanted: str | None, there: str | None) -> bool:
        if wanted is None or there is None:
            return wanted is there
        self.names += 1
        self.same += wanted == there
        return self.renamed.setdefault(wanted, there) == there


class _Renamed(ast.NodeTransformer):
    """Replaces names by the names that the code uses instead."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in node._fields:
            if (type(node), name) in NAMES and (old := getattr(node, name)) is not None:
                setattr(node, name, self.names.get(old, old))
        return super().generic_visit(node)


def file_of(qualified: str, root: Path) -> tuple[Path, list[str]]:
    """Return the file of a qualified name, and the names within the file, outermost first.

    Raises:
        ValueError: there is no such module.
    """
    parts = qualified.split(".")
    for count in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:count]).with_suffix(".py")
        if path.is_file():
            return path, parts[count:]
    raise ValueError(f"{qualified}: there is no such module")


def scope(tree: ast.Module, names: list[str]) -> ast.AST:
    """Return the function, class or variable of a qualified name. If it was renamed, return the scope around it."""
    around: ast.AST = tree
    for name in names:
        inner = [node for node in ast.iter_child_nodes(around) if name in _defined(node)]
        if not inner:
            break
        around = inner[-1]
    return around


def rewritten(source: str, names: list[str], find: str, put: str) -> str:
    """Return the source after replacing the one piece of this form, in the function, class or variable of this name.

    If the piece is not there, the piece with exactly these names elsewhere in the file is replaced.

    Raises:
        ValueError: the piece is not there, or several pieces are equally similar to it.
    """
    tree = ast.parse(source)
    wanted, instead = ast.parse(find).body, ast.parse(put).body
    as_expression = all(len(code) == 1 and isinstance(code[0], ast.Expr) for code in (wanted, instead))
    pieces = _expressions if as_expression else _statements
    form: Any = wanted[0].value if as_expression else wanted  # type: ignore[attr-defined]
    likest = _likest(pieces(scope(tree, names), len(wanted)), form, ENOUGH)
    if not likest:  # the piece may be in a separate function by now
        likest = _likest(pieces(tree, len(wanted)), form, 1.0)
    if len(likest) != 1:
        raise ValueError(f"{'.'.join(names)} has {len(likest)} pieces like {find!r}")
    [(like, piece)] = likest
    renamed = [_Renamed(like.renamed).visit(node) for node in instead]
    piece.replace([node.value for node in renamed] if as_expression else renamed)
    return ast.unparse(ast.fix_missing_locations(tree))


def _likest(pieces: Iterator[Piece], form: Any, enough: float) -> list[tuple[Likeness, Piece]]:
    """Return the pieces of the same form with the largest share of equal names, which must be at least ``enough``."""
    found: list[tuple[Likeness, Piece]] = []
    for piece in pieces:
        like = Likeness()
        if like.matches(form, piece.code) and like.share >= enough:
            found.append((like, piece))
    best = max((like.share for like, _ in found), default=0.0)
    return [(like, piece) for like, piece in found if like.share == best]


@dataclass(frozen=True)
class Piece:
    """Consecutive statements or an expression, and their place in the tree."""

    parent: ast.AST
    name: str
    at: int
    """Its index in the list that is the parent's field; -1: it is the field's only value."""
    count: int
    code: Any

    def replace(self, nodes: list[Any]) -> None:
        """Replace the piece by other nodes."""
        if self.at < 0:
            setattr(self.parent, self.name, nodes[0])
        else:
            getattr(self.parent, self.name)[self.at : self.at + self.count] = nodes


def _statements(within: ast.AST, count: int) -> Iterator[Piece]:
    for parent, name, value in _fields(within):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            for at in range(len(value) - count + 1):
                yield Piece(parent, name, at, count, value[at : at + count])


def _expressions(within: ast.AST, _count: int) -> Iterator[Piece]:
    for parent, name, value in _fields(within):
        if isinstance(value, ast.expr):
            yield Piece(parent, name, -1, 1, value)
        elif isinstance(value, list):
            yield from (Piece(parent, name, at, 1, one) for at, one in enumerate(value) if isinstance(one, ast.expr))


def _fields(within: ast.AST) -> Iterator[tuple[ast.AST, str, Any]]:
    return ((parent, name, value) for parent in ast.walk(within) for name, value in ast.iter_fields(parent))


def _defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
