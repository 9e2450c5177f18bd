"""A sandbox for templates that nobody has read: whatever they do, they end soon and fit into memory.

A template is a Jinja program from whoever published the model. Jinja's own sandbox keeps it from attributes
that start with an underscore and from changing what it was given, but not from counting to 10**27 or from
making a string of a terabyte. So here

- rendering has a budget of `STEPS`, and everything whose cost the template decides pays before it is done:
  the body of a loop, macro or block for its size, each time; a text a step for every `STEP_CHARACTERS`
  characters; a list one for every item. It ends within seconds, and never holds more than some 250 MB;
- an integer has at most `INTEGER_BITS` bits, a value nests at most `DEPTH` deep, and loops `LOOPS` deep;
- the source has at most `SOURCE_CHARACTERS` characters and the result `OUTPUT_CHARACTERS`;
- filters, tests, functions and methods are those that chat templates use, and each has a known price.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from string import Formatter
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

STEPS: Final = 1_000_000
STEP_CHARACTERS: Final = 64
INTEGER_BITS: Final = 1024
DEPTH: Final = 100
LOOPS: Final = 16
SOURCE_CHARACTERS: Final = 1 << 16
OUTPUT_CHARACTERS: Final = 1 << 22

_STEPS, _READ, _COPY, _SPEND = " steps", " read", " copy", " spend"  # names that no template can spell
_SCALARS = (int, float, jinja2.Undefined, type(None))
_WRITTEN = (str, *_SCALARS)
_ITEMS = (list, tuple, range, KeysView, ValuesView, ItemsView)


class LimitError(jinja2.TemplateRuntimeError):
    """A template does more than it may."""


class Steps:
    """What is left of one rendering's budget."""

    def __init__(self) -> None:
        """Begin with all of it."""
        self.left = STEPS

    def spend(self, count: int) -> None:
        """Take `count` steps. Raises `LimitError` when no more are left."""
        self.left -= count
        if self.left < 0:
            raise LimitError(f"it takes more than {STEPS:,} steps")

    def copy(self, value: Any, times: int = 1) -> None:
        """Pay for `times` copies of a text, or of a list but not of what is in it."""
        if isinstance(value, str):
            self.spend(1 + len(value) * times // STEP_CHARACTERS)
        elif isinstance(value, _SCALARS):
            self.spend(1)
            if isinstance(value, int):
                _check_bits(value.bit_length())
        else:
            self.spend(1 + (len(value) * times if isinstance(value, (*_ITEMS, Mapping)) else 0))

    def read(self, value: Any) -> None:
        """Pay for looking at all of a value, as comparing, hashing and writing it do.

        A list may hold one other many times, and that again: so this can find much more than there is.
        """
        if isinstance(value, _WRITTEN):
            self.copy(value)
            return
        level = [value]
        for _ in range(DEPTH):
            below: list[Any] = []
            for item in level:
                self.copy(item)
                if isinstance(item, Mapping):
                    below += item
                    below += item.values()
                elif isinstance(item, _ITEMS):
                    below += item
            if not below:
                return
            level = below
        raise LimitError(f"it nests a value more than {DEPTH} deep")


def _check_bits(bits: int) -> None:
    if bits > INTEGER_BITS:
        raise LimitError(f"it makes an integer of more than {INTEGER_BITS:,} bits")


def _steps(context: Context) -> Steps:
    steps: Steps = context.parent[_STEPS]
    return steps


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` documents it for chat templates, within the limits of this module."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        """Put in what templates may use."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            optimized=False,  # or constants would be computed when compiling, where there is no budget
            finalize=_write,
        )
        self.filters, self.tests = dict(_FILTERS), dict(_TESTS)
        self.globals = {
            "range": self.globals["range"],  # the sandbox's: at most 100,000 numbers
            "dict": dict,
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def load(self, source: str) -> jinja2.Template:
        """Compile a template. Raises what Jinja and Python raise for one that is not valid."""
        if len(source) > SOURCE_CHARACTERS:
            raise LimitError(f"it has {len(source):,} characters, but may have {SOURCE_CHARACTERS:,}")
        parsed = self.parse(source)
        _check_depth(parsed)
        tree = _Priced(self).visit(parsed)
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Run a template. Raises whatever Jinja and Python raise for what it does."""
        text = template.render({**variables, _STEPS: Steps()})
        if len(text) > OUTPUT_CHARACTERS:
            raise LimitError(f"it writes {len(text):,} characters, but may write {OUTPUT_CHARACTERS:,}")
        return text

    # What the sandbox asks of us.

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have this attribute: of values, the methods in `_METHODS` alone."""
        if isinstance(obj, (Namespace, LoopContext, Cycler, Joiner, TemplateReference)):
            return super().is_safe_attribute(obj, attr, value)
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to `call`, which has the budget."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item, but never by a tuple, which may take forever to hash."""
        if isinstance(argument, tuple):
            raise LimitError("it looks up a tuple")
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an arithmetic operation after paying for it."""
        steps = _steps(context)
        steps.copy(left)
        steps.copy(right)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            _check_bits(bits * right if operator == "**" else bits + right.bit_length())
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    steps.copy(value, times)
        elif operator == "%" and isinstance(left, str):
            if _WIDE.search(left):
                raise LimitError("it formats with a name or a width of more than 3 digits")
            steps.read(right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, method or function after paying for it."""
        steps = _steps(context)
        if isinstance(function, (Macro, LoopContext, BlockReference)):
            steps.spend(1 + len(args) + len(kwargs))  # their bodies pay for the rest
            return super().call(context, function, *args, **kwargs)
        steps.read([args, kwargs])
        if isinstance(function, types.BuiltinMethodType):
            owner, name = function.__self__, function.__name__
            steps.copy(owner)
            if isinstance(owner, str):
                if name == "format":
                    return _BudgetFormatter(self, steps).vformat(owner, args, kwargs)
                _pay_for_method(steps, owner, name, args)
            elif isinstance(owner, (list, tuple)):  # index and count compare
                steps.read(owner)
        result = super().call(context, function, *args, **kwargs)
        steps.copy(result)
        return result


_WIDE = re.compile(r"%[-+ #0]*(?:\(|\*|\d{4}|\d*\.(?:\*|\d{4}))")

_MAPPING_METHODS = {"get", "items", "keys", "values"}
_METHODS: dict[type, set[str]] = {
    str: {
        *("capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha"),
        *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower"),
        *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex"),
        *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase"),
        *("title", "upper"),
    },
    list: {"count", "index"},
    tuple: {"count", "index"},
    Mapping: _MAPPING_METHODS,
}


def _pay_for_method(steps: Steps, text: str, name: str, args: tuple[Any, ...]) -> None:
    """For the methods whose cost or result is not in proportion to the text and the arguments."""
    texts = [arg for arg in args if isinstance(arg, str)]
    if name == "replace" and len(texts) == 2:
        _pay_for_replace(steps, text, *texts)
    elif name == "join" and args:
        _pay_for_join(steps, text, args[0])
    elif name in ("split", "rsplit", "splitlines"):
        steps.spend(text.count(texts[0]) if texts and texts[0] else len(text) // 2)
    elif name in ("strip", "lstrip", "rstrip") and texts:
        steps.spend(len(text) * len(texts[0]) // STEP_CHARACTERS)


def _pay_for_replace(steps: Steps, text: str, old: str, new: str) -> None:
    steps.spend(text.count(old) * len(new) // STEP_CHARACTERS)


def _pay_for_join(steps: Steps, between: str, items: Any) -> None:
    steps.copy(between, len(items) if hasattr(items, "__len__") else 1)


class _BudgetFormatter(SandboxedFormatter):
    """`str.format`, every field of which pays."""

    def __init__(self, environment: TemplateSandbox, steps: Steps) -> None:
        super().__init__(environment)
        self.steps = steps

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{4}", format_spec):
            raise LimitError("it formats with a width of more than 3 digits")
        self.steps.read(value)
        return Formatter.format_field(self, value, format_spec)


class _Namespace(Namespace):
    """Jinja's, which would write out what is in it, and that may be other namespaces, many times over."""

    def __repr__(self) -> str:
        return "<namespace>"


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100:
        raise LimitError("it formats a date with more than 100 characters")
    return datetime.now().strftime(form)


@pass_context
def _write(context: Context, value: Any) -> Any:
    """Called for everything that is written."""
    _steps(context).read(value)
    return value


# Filters and tests. Each takes the context, for the budget.


def _priced(function: Any, pay: Callable[..., None]) -> Callable[..., Any]:
    """A filter or test of Jinja's that calls `pay(steps, value, *args)` before it begins."""
    kind = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def priced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        steps = _steps(context)
        pay(steps, value, *args, *kwargs.values())
        wanted = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = () if kind is None else (wanted[kind.name],)
        result = function(*first, value, *args, **kwargs)
        if isinstance(result, Iterator):
            found = []
            for item in result:  # pays while it grows
                steps.spend(1)
                found.append(item)
            return found
        steps.copy(result)
        return result

    return priced


def _pay_once(steps: Steps, value: Any, *args: Any) -> None:
    steps.spend(1)


def _pay_by_item(steps: Steps, value: Any, *args: Any) -> None:
    """For filters that go through the items, and do with each what the arguments say."""
    steps.read(args)
    count = len(value) if hasattr(value, "__len__") else 1
    steps.spend(count * (1 + sum(len(arg) for arg in args if isinstance(arg, str))))


def _pay_for_all(steps: Steps, value: Any, *args: Any) -> None:
    steps.read(value)
    steps.read(args)


def _pay_for_order(steps: Steps, value: Any, *args: Any) -> None:
    steps.read(value)
    _pay_by_item(steps, value, *args)


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: Any = None) -> str:
    steps = _steps(context)
    if attribute is not None:
        value = context.environment.call_filter(
            "map", value, kwargs={"attribute": attribute}, context=context
        )
    items = list(value) if not isinstance(value, str) else value
    steps.read([items, d])
    if isinstance(items, str):
        steps.spend(len(items))
    _pay_for_join(steps, d, items)
    return d.join(map(str, items))


@pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int = -1) -> str:
    steps = _steps(context)
    steps.read([value, old, new])
    text = str(value)
    _pay_for_replace(steps, text, old, new)
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def _indent(
    context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    steps = _steps(context)
    steps.read(value)
    space = width if isinstance(width, str) else " " * min(width, OUTPUT_CHARACTERS)
    steps.copy(space, 1 + str(value).count("\n"))
    return FILTERS["indent"](str(value), space, first, blank)


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes for HTML, which a language model would see as other text."""
    steps = _steps(context)
    steps.read(separators)
    before = steps.left
    steps.read(value)
    if indent is not None:
        if not isinstance(indent, int) or not 0 <= indent <= 8:
            raise LimitError(f"it indents JSON by {indent!r}, but may by 0 to 8")
        steps.spend((before - steps.left) * (1 + DEPTH * indent // STEP_CHARACTERS))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _spender(pay: Callable[..., None]) -> Callable[..., Any]:
    """A filter that changes nothing and pays; `_Priced` puts it into templates."""

    @pass_context
    def spend(context: Context, value: Any, *args: Any) -> Any:
        pay(_steps(context), value, *args)
        return value

    return spend


_FILTERS: dict[str, Callable[..., Any]] = {
    _READ: _spender(Steps.read),
    _COPY: _spender(Steps.copy),
    _SPEND: _spender(lambda steps, value, count: steps.spend(count)),
    "join": _join,
    "replace": _replace,
    "indent": _indent,
    "tojson": _to_json,
    "safe": _priced(str, _pay_for_all),  # nothing is escaped, so nothing is safer
    **{
        name: _priced(FILTERS[name], pay)
        for pay, names in {
            _pay_once: "abs count d default first last length",
            _pay_by_item: "items list map reject rejectattr reverse select selectattr",
            _pay_for_all: "capitalize float int lower string title trim upper",
            _pay_for_order: "dictsort max min sort unique",
        }.items()
        for name in names.split()
    },
}
_TESTS: dict[str, Callable[..., Any]] = {
    "even": lambda value: int(value) % 2 == 0,
    "odd": lambda value: int(value) % 2 == 1,
    **{
        name: _priced(cast(Any, TESTS[name]), pay)
        for pay, names in {
            _pay_once: "boolean callable defined false float integer iterable mapping none number sameas "
            "sequence string true undefined",
            _pay_for_all: "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper",
        }.items()
        for name in names.split()
    },
}


def _check_depth(tree: nodes.Node) -> None:
    """Refuse code that nests deeper than compiling it could follow; its time grows with depth times size."""
    level: list[nodes.Node] = [tree]
    for _ in range(2 * DEPTH):
        level = [child for node in level for child in node.iter_child_nodes()]
        if not level:
            return
    raise LimitError(f"its code nests more than {2 * DEPTH} deep")


class _Priced(NodeTransformer):
    """Puts the paying filters into a template, where Jinja's code has no hook."""

    def __init__(self, environment: TemplateSandbox) -> None:
        self._environment = environment
        self._loops = 0

    def visit_For(self, node: nodes.For) -> nodes.For:
        if self._loops == LOOPS:
            raise LimitError(f"it nests loops more than {LOOPS} deep")
        self._loops += 1
        steps = _body_steps(node)
        self.generic_visit(node)
        self._loops -= 1
        node.body = [_toll(steps, node.lineno), *node.body]
        if node.test is not None:
            node.test = _through(_SPEND, cast(nodes.Expr, node.test), nodes.Const(steps))
        return node

    def _body(self, node: Any) -> Any:
        steps = _body_steps(node)
        self.generic_visit(node)
        node.body = [_toll(steps, node.lineno), *node.body]
        return node

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(node.data, lineno=node.lineno)  # which `_write` sees

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _through("join", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _read(node.expr)
        for operand in node.ops:
            operand.expr = _read(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _read(node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _through(_COPY, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise LimitError("it switches escaping on, which is for HTML")


def _through(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _read(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _through(_READ, node)


def _toll(steps: int, lineno: int) -> nodes.ExprStmt:
    nothing = nodes.Const(None, lineno=lineno)
    return nodes.ExprStmt(_through(_SPEND, nothing, nodes.Const(steps)), lineno=lineno)


def _body_steps(node: nodes.Node) -> int:
    """What to pay each time a body runs: a step for about eight of the operations in it."""
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) // 8


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only lets them through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
