"""Makes markdown from values, and from the docstrings of fields and constants in the code."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from everstep.model.finding import Reason


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table; an empty cell stays empty."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"|{'|'.join(f' {text} ' if text else ' ' for text in line)}|" for line in lines)


def cell(value: object) -> str:
    """A value as one line of text for a cell of a table, with bars escaped."""
    return " ".join(str(value).split()).replace("|", "\\|")


def first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((text or "").split("\n\n")[0].split())


def paragraph(*sentences: str) -> str:
    """A paragraph of sentences, in lines of up to 110 characters."""
    return textwrap.fill(" ".join(sentences), 110, break_long_words=False, break_on_hyphens=False)


def code(text: object) -> str:
    """A name in the code, in backticks; an empty name stays empty."""
    return f"`{text}`" if str(text) else ""


def sentence(text: str) -> str:
    """A text from the code as a sentence, with a capital letter and a full stop."""
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if not text or text[-1] in ".?!…" else ".")


def value_of(field: FieldInfo) -> str:
    """The default of a setting as text."""
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if default in (None, "", (), [], {}):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, int | float) else code(default)


def descriptions(owner: type[Any] | ModuleType) -> dict[str, str]:
    """Return name → the first paragraph of the docstring below that name, in a class and its bases or in a module."""
    if isinstance(owner, ModuleType):
        return dict(_below(ast.parse(inspect.getsource(owner)).body))
    found: dict[str, str] = {}
    for kind in reversed(owner.__mro__):
        if kind.__module__.split(".")[0] not in ("builtins", "pydantic", "enum", "abc"):
            [tree] = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body
            assert isinstance(tree, ast.ClassDef)
            found |= dict(_below(tree.body))
    return found


def _below(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement, after in pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        for target in targets if is_text else ():
            if isinstance(target, ast.Name):
                yield target.id, first_paragraph(str(after.value.value))  # type: ignore[attr-defined]


def settings(model: type[BaseModel], without: Iterable[str] = ()) -> str:
    """The fields of a model as a table, each with its default and its meaning."""
    below = descriptions(model)
    fields = [(name, field) for name, field in model.model_fields.items() if name not in set(without)]
    rows = [(code(name), value_of(field), sentence(field.description or below.get(name, ""))) for name, field in fields]
    return table(("setting", "default", "meaning"), rows) if rows else ""


def reasons(found: Iterable[Reason]) -> str:
    """The reason codes of an inspection or a test, as a table."""
    rows = [
        (code(one.code), f"{one.verdict}{', sure' if one.sure else ''}", one.owner, one.remedy, one.means)
        for one in found
    ]
    return table(("reason", "verdict", "owner", "remedy", "meaning"), rows)
