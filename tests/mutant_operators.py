"""Mutations that cosmic-ray does not have: a condition, a statement or an argument of a call that is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators import boolean_replacer, break_continue, comparison_operator_replacement
from cosmic_ray.operators.number_replacer import NumberReplacer
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.zero_iteration_for_loop import ZeroIterationForLoop

Span = tuple[tuple[int, int], tuple[int, int]]
# A boundary or its opposite: `==` for `is` and the like change nothing that a test could see.
SWAPS = ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_Gt", "Gt_Lt", "Is_IsNot", "IsNot_Is")


def code(node: Any) -> str:
    """Its text without the white space and comments before it."""
    text: str = node.get_code(include_prefix=False)
    return text


class DroppedOperand(Operator):
    """Leaves out one operand of `and` or `or`."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type in ("and_test", "or_test"):
            for operand in node.children[::2]:
                yield operand.start_pos, operand.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        kept = [code(operand) for i, operand in enumerate(node.children[::2]) if i != index]
        return parso.parse(" " + f" {node.children[1].value} ".join(kept))

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("a and b and c", "a and c", occurrence=1),)


class DroppedFilter(Operator):
    """Leaves out the condition of a comprehension."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type == "comp_if":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return None

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("[x for x in y if x]", "[x for x in y]"),)


class LostStatement(Operator):
    """Leaves out, in a function, a call or what is written to an attribute or an element."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type == "simple_stmt" and self._has_an_effect(node.children[0]):
            function = node.search_ancestor("funcdef")
            if function is not None and function.name.value not in ("__init__", "__post_init__"):
                yield node.start_pos, node.end_pos

    @staticmethod
    def _has_an_effect(statement: Any) -> bool:
        if statement.type == "expr_stmt":
            is_added_to = statement.children[1].type == "operator" and statement.children[1].value != "="
            return is_added_to or statement.children[0].type in ("power", "atom_expr")
        return statement.type in ("power", "atom_expr") and code(statement).endswith(")")

    def mutate(self, node: Any, index: int) -> Any:
        return parso.parse(node.get_first_leaf().prefix + "pass\n")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("def f(x):\n    x.clear()\n", "def f(x):\n    pass\n"),)


class DroppedArgument(Operator):
    """Leaves out one keyword argument of a call, so that its default or nothing is taken."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        for argument in self._arguments(node):
            if argument.type == "argument" and argument.children[1] == "=":
                yield argument.start_pos, argument.end_pos

    @staticmethod
    def _arguments(node: Any) -> list[Any]:
        if node.type == "arglist" and node.parent.type == "trailer":
            return [each for each in node.children if each != ","]
        if node.type == "trailer" and node.children[0] == "(" and node.children[1].type == "argument":
            return [node.children[1]]
        return []

    def mutate(self, node: Any, index: int) -> Any:
        arguments = self._arguments(node)
        dropped = [each for each in arguments if each.type == "argument" and each.children[1] == "="][index]
        kept = ", ".join(code(each) for each in arguments if each is not dropped)
        return parso.parse(f"({kept})" if node.type == "trailer" else kept)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(a, b=1, c=2)", "f(a, c=2)"), Example("f(b=1)", "f()"))


KINDS: dict[str, tuple[type[Operator], ...]] = {
    "condition": (
        boolean_replacer.AddNot,
        boolean_replacer.ReplaceAndWithOr,
        boolean_replacer.ReplaceOrWithAnd,
        DroppedOperand,
        DroppedFilter,
    ),
    "comparison": tuple(
        getattr(comparison_operator_replacement, f"ReplaceComparisonOperator_{each}") for each in SWAPS
    ),
    "statement": (
        LostStatement,
        break_continue.ReplaceBreakWithContinue,
        break_continue.ReplaceContinueWithBreak,
        ZeroIterationForLoop,
    ),
    "value": (NumberReplacer, boolean_replacer.ReplaceTrueWithFalse, boolean_replacer.ReplaceFalseWithTrue),
    "argument": (DroppedArgument,),
}

# What only words a message, and what is the same by construction: a check of our own that holds, a decorator, lengths
# that zip compares and that are equal, what is imported for types alone.
SILENT = ("raise_stmt", "assert_stmt", "decorator", "fstring", "fstring_expr")
WORDS = {"what", "next", "next_step", "where", "text", "said", "message", "help", "about", "description", "examples"}
SAME = {"strict", "daemon", "stacklevel", "flush"}


def is_silent(node: Any) -> bool:
    """Whether no test could or should see a change at `node`: a message's words, or the same by construction."""
    if node.search_ancestor(*SILENT) is not None or node.type in SILENT:
        return True
    function = node.search_ancestor("funcdef")
    if function is not None and function.name.value in ("__repr__", "__str__", "__del__"):
        return True
    own = [node] if node.type == "argument" else []
    for argument in (*own, *_above(node, "argument")):
        if code(argument.children[0]) in WORDS | SAME:
            return True
    if _is_worded(node) or any(_is_for_words(statement, function) for statement in _above(node, "expr_stmt")):
        return True
    return any("TYPE_CHECKING" in code(each.children[1]) for each in _above(node, "if_stmt"))


def _is_worded(node: Any) -> bool:
    """Whether it is a part of what a message's words are set to."""
    names = (name for statement in _above(node, "expr_stmt") for name in statement.get_defined_names())
    return any(code(name) in WORDS for name in names)


def _is_for_words(statement: Any, function: Any) -> bool:
    """Whether the names that a statement sets in a function are used in messages alone."""
    own = statement.get_defined_names()
    if function is None or any(name.type != "name" or name.parent.type == "trailer" for name in own):
        return False
    names = {name.value for name in own}
    uses = [leaf for leaf in _leaves(function) if leaf.type == "name" and leaf.value in names and leaf not in own]
    return bool(uses) and all(leaf.search_ancestor(*SILENT) is not None or _is_worded(leaf) for leaf in uses)


def _leaves(node: Any) -> Iterator[Any]:
    leaf, last = node.get_first_leaf(), node.get_last_leaf()
    while leaf is not None and leaf is not last:
        yield leaf
        leaf = leaf.get_next_leaf()


def _above(node: Any, kind: str) -> Iterator[Any]:
    while (node := node.search_ancestor(kind)) is not None:
        yield node
