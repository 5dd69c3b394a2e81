"""What tool authors write (Tool, @tool, ToolResponse), the toolset, and the two built-in tools."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import time
import warnings
from collections.abc import Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsm_rollout import tools
from fsm_rollout.arrays import FLOAT32_MAX
from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.limits import CUT_MARK
from fsm_rollout.tools.base import (
    FunctionTool,
    Tool,
    ToolResponse,
    TruncateSide,
    cut_text,
    finite,
    to_response,
    tool,
)
from fsm_rollout.tools.calculator import MAX_CHARS, Calculator, evaluate
from fsm_rollout.tools.gsm8k import Gsm8kAnswer, parse_number
from fsm_rollout.tools.registry import Toolset


def word_count(text: str) -> str:
    """Count words."""
    return str(len(text.split()))


class Lookup(Tool):
    """Look a word up."""

    def create(self, book: str, pages: int = 10) -> None: ...
    def execute(self, word: str) -> str:
        return word


# -- authors ---------------------------------------------------------------------------------------


def test_a_tool_is_called_as_its_class_in_snake_case_unless_it_has_a_name() -> None:
    class HTTPGetTool(Tool): ...

    class Named(Tool):
        name = "other"

    class Heir(Named): ...

    assert [t.name for t in (HTTPGetTool, Named, Heir, Lookup)] == [
        "http_get_tool",
        "other",
        "heir",
        "lookup",
    ]


def test_a_function_becomes_a_stateless_tool_bare_or_with_options() -> None:
    bare = tool(word_count)
    named = tool(name="count", max_concurrent=2, truncate_side="left")(word_count)
    assert issubclass(bare, FunctionTool)
    assert (bare.name, bare.__doc__, bare().execute("a b")) == ("word_count", "Count words.", "2")
    assert (named.name, named.max_concurrent, named.truncate_side) == ("count", 2, "left")
    assert named.function("a") == "1"


def test_an_unknown_option_of_the_decorator_is_refused() -> None:
    with pytest.raises(TypeError, match="no option 'nmae'"):
        tool(nmae="x")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("as it is", "as it is"),
        ({"a": None, "b": True, "c": "é"}, '{"a": null, "b": true, "c": "é"}'),
        ([1, "é"], '[1, "é"]'),
        (3, "3"),
        (2.5, "2.5"),
        (False, "false"),
    ],
)
def test_json_values_become_text_without_python_in_it(value: Any, text: str) -> None:
    assert to_response(value) == ToolResponse(text)


@pytest.mark.parametrize(
    "value",
    [b"x", object(), {1, 2}, {"a": object()}, float("nan"), {"a": float("inf")}],
    ids=["bytes", "object", "set", "dict of objects", "nan", "dict of inf"],
)
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        to_response(value)


def test_a_response_keeps_what_it_is_given_as_plain_values() -> None:
    response = ToolResponse("t", images=["i"], reward=np.float32(0.5), metrics={"n": 1}, stop=True)  # type: ignore[arg-type]
    assert to_response(response) is response
    assert (response.images, response.reward, response.metrics) == (("i",), 0.5, {"n": 1.0})
    assert type(response.reward) is float


@pytest.mark.parametrize(
    "fields",
    [
        {"text": None},
        {"text": b"x"},
        {"reward": float("nan")},
        {"reward": "1"},
        {"reward": 10**400},
        {"metrics": {"n": float("inf")}},
    ],
)
def test_a_response_that_could_not_be_data_cannot_be_made(fields: Mapping[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        ToolResponse(**fields)


TOO_LARGE = 3.4028235677973366e38
"""the least that float32 rounds to infinity"""


@example(TOO_LARGE)
@example(math.nextafter(TOO_LARGE, 0))
@given(st.floats() | st.integers() | st.booleans() | st.text() | st.none())
def test_a_reward_is_a_finite_float_or_refused(value: Any) -> None:
    try:
        number = finite(value, what="reward")
    except (TypeError, ValueError):
        assert isinstance(value, str | None) or abs(value) > FLOAT32_MAX or value != value
    else:
        assert type(number) is float
        assert number == value or abs(value) > 2**53


@given(
    text=st.text(),
    max_chars=st.integers(0, 20),
    side=st.sampled_from(["left", "right", "middle"]),
)
def test_a_cut_keeps_the_other_side_and_says_so(
    text: str, max_chars: int, side: TruncateSide
) -> None:
    cut = cut_text(text, max_chars, side=side)
    if len(text) <= max_chars:
        assert cut == text
        return
    head, marker, tail = cut.partition(CUT_MARK)
    assert marker
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) == max_chars
    assert (not head, not tail)[side == "right"] or side == "middle"


# -- toolset ---------------------------------------------------------------------------------------


def test_a_toolset_takes_classes_functions_names_and_paths_in_order() -> None:
    toolset = Toolset([Lookup, word_count, "calculator", "fsm_rollout.tools.gsm8k:Gsm8kAnswer"])
    names = ["lookup", "word_count", "calculator", "check_answer"]
    assert list(toolset) == names
    assert [schema["function"]["name"] for schema in toolset.schemas] == names
    assert (len(toolset), "lookup" in toolset, "other" in toolset) == (4, True, False)
    json.dumps(toolset.schemas)


def test_an_entry_point_is_a_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no module named 'missing'")

    points = [
        SimpleNamespace(name="look", value="x:Lookup", load=lambda: Lookup),
        SimpleNamespace(name="broken", value="x:Broken", load=broken),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: points)
    assert list(Toolset(["look"])) == ["lookup"]
    with pytest.raises(ConfigError, match=r"'broken' \(x:Broken\) cannot be imported"):
        Toolset(["broken"])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("calculater", "no tool is registered as 'calculater', did you mean `calculator`?"),
        ("nowhere:Tool", "cannot import 'nowhere'"),
        ("fsm_rollout.tools.gsm8k:Gsm8k", "has no 'Gsm8k', did you mean `Gsm8kAnswer`?"),
        ("fsm_rollout.tools.gsm8k:Fraction", "is not a tool"),
        (42, "42 is not a tool"),
        (type("Odd", (Lookup,), {"name": "no spaces"}), "name 'no spaces' must be"),
        (type("Odd", (Lookup,), {"truncate_side": "top"}), "must be one of left, right, middle"),
        (type("Odd", (Lookup,), {"max_concurrent": 0}), "max_concurrent must be"),
        (type("Odd", (Lookup,), {"max_response_tokens": "9"}), "max_response_tokens must be"),
    ],
)
def test_a_tool_that_cannot_run_is_a_config_error(item: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Toolset([item])
    assert message in str(caught.value)


def test_two_tools_of_one_name_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="two tools are called 'lookup'"):
        Toolset([Lookup, tool(name="lookup")(word_count)])


@pytest.mark.parametrize(
    "row", [{"lookup": {"create_kwargs": {"book": "b"}, "release_kwargs": None}}]
)
def test_a_row_whose_kwargs_fit_passes(row: dict[str, Any]) -> None:
    Toolset([Lookup, word_count]).check_row(row)
    Toolset([word_count]).check_row(None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "tools_kwargs['lookup'].create_kwargs: missing parameter `book`"),
        ([], "tools_kwargs must be an object, got list"),
        ({"look": {}}, "names no tool of this run: 'look', did you mean `lookup`?"),
        ({"os:system": {}}, "names no tool of this run: 'os:system'"),
        ({"lookup": {"create": {}}}, "has no field 'create', did you mean `create_kwargs`?"),
        ({"lookup": []}, "tools_kwargs['lookup'] must be an object, got list"),
        ({"lookup": {"create_kwargs": "b"}}, "create_kwargs must be an object, got str"),
        ({"lookup": {"create_kwargs": {"book": 1}}}, "parameter `book`: expected `str`"),
    ],
)
def test_a_row_whose_kwargs_do_not_fit_is_a_config_error(row: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Toolset([Lookup]).check_row(row)
    assert message in str(caught.value)


def test_the_names_of_the_package_load_lazily_and_are_the_real_ones() -> None:
    assert tools.Tool is Tool
    assert [getattr(tools, name).__name__ for name in tools.__all__] == tools.__all__
    name = "Tol"
    with pytest.raises(AttributeError, match="no attribute 'Tol'"):
        getattr(tools, name)


# -- calculator ------------------------------------------------------------------------------------


def calculate(expression: str) -> str:
    return Calculator().execute(expression)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("6/2", "3"),
        ("7/2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("(3 + 4) * -5", "-35"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 3", "4"),
        ("-7 % 3", "2"),
        ("1,234,567 + 1", "1234568"),
        ("6 \u00d7 7 \u2212 2 \u00f7 2", "41"),
        ("2 ** -2", "0.25"),
        ("2 ** 0.5", "1.4142135623731"),
        ("1 / 3", "0.333333333333333"),
        ("2e3 + .5", "2000.5"),
        ("10 ** 20 / 3", "3.33333333333333E+19"),
        ("1 /\n 8", "0.125"),
        ("+".join(["1"] * 250), "250"),
        ("+3", "3"),
        (
            "12345678901234567890 * 98765432109876543210",
            str(12345678901234567890 * 98765432109876543210),
        ),
    ],
)
def test_the_calculator_is_exact_and_writes_numbers_as_people_do(
    expression: str, result: str
) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "9**9**9",
        "9**9**9**9",
        "10**1e300",
        "(9**600)**600",
        "1e999",
        "2**0.5**0.5**-900",
        "(10**600)**0.5",
        "(-8) ** 0.5",
        "1/0",
        "0**-1",
        "0**-0.5",
        "1" * (MAX_CHARS + 1),
        "1+" * 5_000_000 + "1",
        "(" * 400 + "1" + ")" * 400,
        "-" * 900 + "1",
        "-" * 400 + "1",
        "10**600 * 10**600",
        "1 +",
        "1 2",
        "3^2",
        "1,2",
        "e",
        "1.2.3",
        "a + 1",
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "[1][0]",
        "1 if 1 else 2",
        "1 < 2",
        "0x10",
        "1j",
        "'a' * 3",
        "\x00",
        "\u0661 + \u0662",
    ],
)
def test_what_is_no_sane_arithmetic_is_told_to_the_model_within_moments(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolError) as caught:
        calculate(expression)
    assert time.process_time() - started < 5  # or for ever
    assert 0 < len(str(caught.value)) < 200


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def combine(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (left, a), sign, (right, b) = parts
    sign = "*" if sign == "/" and b == 0 else sign
    return f"({left} {sign} {right})", Fraction(OPERATORS[sign](a, b))


@given(
    st.recursive(
        st.integers(0, 99).map(lambda number: (str(number), Fraction(number))),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(combine),
        max_leaves=8,
    )
)
def test_an_expression_has_its_exact_value(made: tuple[str, Fraction]) -> None:
    expression, value = made
    assert evaluate(expression) == value


@given(st.text(alphabet="0123456789.eE+-*/%() ,", max_size=60))
def test_no_text_of_arithmetic_signs_breaks_or_stalls_the_calculator(text: str) -> None:
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(ToolError):
            calculate(text)
    assert time.process_time() - started < 5


# -- gsm8k -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", 1234),
        ("$5", 5),
        ("5.0", 5),
        ("#### 18", 18),
        ("She has 3 + 4 = 7 eggs.\n#### 7", 7),
        ("18 apples.", 18),
        ("-3", -3),
        ("\u22123", -3),
        ("$1,234,567.50", Fraction(12345675, 10)),
        (18, 18),
        (2.5, Fraction(5, 2)),
        (1e21, 10**21),
        (1e-7, Fraction(1, 10**7)),
        ("about .5", Fraction(1, 2)),
    ],
)
def test_an_answer_is_the_one_number_in_the_text(text: str | float, number: Any) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        float("nan"),
        float("inf"),
        "seven",
        "1 or 2",
        "3 + 4",
        "####",
        "1" * 100_000,
        "__import__('os')",
        "not a number",
        "1/2",
    ],
)
def test_what_is_not_one_number_is_refused(text: str | float) -> None:
    with pytest.raises(ToolError, match="must be one number"):
        parse_number(text)


def score(keep: str, answers: list[str]) -> float:
    checker = Gsm8kAnswer()
    checker.create("#### 1,000", **({"keep": keep} if keep else {}))  # type: ignore[arg-type]
    said = [checker.execute(answer) for answer in answers]
    assert said == ["correct" if answer == "1000" else "incorrect" for answer in answers]
    return checker.calc_reward()


def test_the_reward_is_the_best_answer_or_the_last_over_the_whole_request() -> None:
    assert score("", ["7", "1000", "8"]) == 1.0
    assert score("best", ["7", "1000", "8"]) == 1.0
    assert score("last", ["7", "1000", "8"]) == 0.0
    assert score("last", ["7", "1000"]) == 1.0
    assert score("best", []) == 0.0


def test_a_ground_truth_that_is_no_number_fails_before_anything_is_sampled() -> None:
    assert Gsm8kAnswer.required
    with pytest.raises(ToolError, match="must be one number"):
        Gsm8kAnswer().create("none")


def test_a_refused_answer_does_not_change_the_score() -> None:
    checker = Gsm8kAnswer()
    checker.create(5, keep="last")
    checker.execute("5")
    with pytest.raises(ToolError):
        checker.execute("5 or 6")
    assert checker.calc_reward() == 1.0
