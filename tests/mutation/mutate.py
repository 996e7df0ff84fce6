"""Mutants of a Python file: the same text but for one small mistake.

A mutant swaps a comparison, an operator, two arguments or two returned values, moves a number,
negates a condition, or leaves a statement out. Messages of errors, annotations, docstrings and
imports are left alone.

>>> for mutant in mutants("f.py", "def f(x): return 1 if x < 2 else x * 3"):
...     print(mutant.kind, "|", mutant.before, "|", mutant.after)
condition | x < 2 | not (x < 2)
comparison | x < 2 | x <= 2
number | 2 | 3
number | 1 | 2
operator | x * 3 | x / 3
number | 3 | 4
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
SYMMETRIC = {"max", "min", "transpose", "isinstance", "logaddexp", "maximum", "minimum", "setattr"}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    last: int  # the last line of what is changed
    start: int  # bytes of the file that are replaced
    stop: int
    kind: str
    before: str
    after: str

    def apply(self, text: str) -> str:
        data = text.encode()
        return (data[: self.start] + self.after.encode() + data[self.stop :]).decode()


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """All mutants, in the order of the file."""
    yield from _Finder(file, text).of_body(ast.parse(text))


class _Finder:
    def __init__(self, file: str, text: str) -> None:
        self.file, self.data = file, text.encode()
        self.begin = [0]
        for line in self.data.splitlines(keepends=True):
            self.begin.append(self.begin[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.begin[node.lineno - 1] + node.col_offset
        return start, self.begin[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, stop = self.span(node)
        return self.data[start:stop].decode()

    def change(self, kind: str, node: ast.AST, after: str) -> Mutant:
        place = node.lineno, node.end_lineno, *self.span(node)
        return Mutant(self.file, *place, kind, self.text(node), after)

    def of_body(self, node: ast.AST) -> Iterator[Mutant]:
        for child in ast.iter_child_nodes(node):
            yield from self.of(child)

    def of(self, node: ast.AST) -> Iterator[Mutant]:
        """Mutants of this node and of all below it."""
        if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
            return
        if isinstance(node, ast.Raise):
            yield self.change("statement", node, "pass")
            return  # what is raised is a message
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Assert):
            return  # for the type checker
        yield from self.here(node)
        skipped = ("annotation", "returns", "decorator_list", "type_params")
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.of(child)

    def here(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if self.text(test) != "TYPE_CHECKING":
                    yield self.change("condition", test, f"not ({self.text(test)})")
            case ast.comprehension(ifs=[test, *_]):
                yield self.change("condition", test, f"not ({self.text(test)})")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self.change("condition", node, f"({self.text(operand)})")
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                if not isinstance(operand, ast.Constant):
                    yield self.change("operator", node, f"({self.text(operand)})")
            case ast.Compare(ops=[op], left=left, comparators=[right]):
                yield self.between("comparison", node, left, right, *COMPARISONS[type(op)])
            case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
                texts = ast.JoinedStr | ast.List | ast.Tuple
                text = isinstance(left, texts) or isinstance(right, texts)
                if not text and not any(
                    isinstance(x, ast.Constant) and isinstance(x.value, str) for x in (left, right)
                ):
                    yield self.between("operator", node, left, right, *OPERATORS[type(op)])
            case ast.BoolOp(op=op, values=[left, right, *_]):
                pair = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield self.between("condition", node, left, right, *pair)
            case ast.Constant(value=bool()):
                yield self.change("number", node, str(not node.value))
            case ast.Constant(value=int()):
                yield self.change("number", node, str(node.value + 1))
            case ast.Constant(value=float()):
                yield self.change("number", node, f"({self.text(node)} + 1)")
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
                yield self.change("statement", node, "pass")
            case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
                yield self.change("statement", node, "pass")
            case ast.Continue():
                yield self.change("statement", node, "break")
            case ast.Break():
                yield self.change("statement", node, "continue")
            case ast.Return(value=ast.Tuple(elts=[first, second, *_])):
                yield from self.swapped(node, first, second)
            case ast.Call(args=[first, second, *rest]):
                name = self.text(node.func).split(".")[-1]
                if name == "where" and rest:
                    yield from self.swapped(node, second, rest[0])
                elif name not in SYMMETRIC:
                    yield from self.swapped(node, first, second)

    def between(
        self, kind: str, node: ast.AST, left: ast.AST, right: ast.AST, old: str, new: str
    ) -> Mutant:
        """The node with the operator between two operands replaced."""
        start = self.span(node)[0]
        middle = self.span(left)[1] - start, self.span(right)[0] - start
        data = self.text(node).encode()
        gap = data[middle[0] : middle[1]].decode()
        changed = re.sub(re.escape(old).replace(r"\ ", r"\s+"), new, gap, count=1)
        after = data[: middle[0]] + changed.encode() + data[middle[1] :]
        return self.change(kind, node, after.decode())

    def swapped(self, node: ast.AST, first: ast.AST, second: ast.AST) -> Iterator[Mutant]:
        if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            return
        one, two = self.text(first), self.text(second)
        if one == two:
            return
        start = self.span(node)[0]
        a, b = (tuple(x - start for x in self.span(part)) for part in (first, second))
        data = self.text(node).encode()
        after = data[: a[0]] + two.encode() + data[a[1] : b[0]] + one.encode() + data[b[1] :]
        yield self.change("order", node, after.decode())
