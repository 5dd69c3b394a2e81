"""Tool schemas: what the model is shown, what its arguments become, what a row must fit."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.tools.base import Tool, tool
from fsm_rollout.tools.schema import ToolSchema, read_docstring


@dataclass
class Point:
    """A place."""

    x: Annotated[float, msgspec.Meta(description="to the right")]
    y: float = 0.0


class Filter(TypedDict):
    field: str
    values: NotRequired[list[int]]


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


class Span(msgspec.Struct):
    start: Point
    stop: Point | None = None


class Pair(NamedTuple):
    name: str
    value: int


@dataclass
class Node:
    value: int
    children: list[Node] = field(default_factory=list)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    return ToolSchema(tool(function)).parameters


class Search(Tool):
    """Search the web.

    Slowly.
    """

    def create(self, index: str, limits: dict[str, int] | None = None) -> None: ...

    def execute(self, query: str, depth: int = 1, *, user: str, region: str = "eu") -> str:
        """Find pages.

        Args:
            query (str): what to look for,
                in a few words
            depth: how many pages
        Returns:
            depth: not a parameter
        """
        return f"{query} {depth} {user} {region}"


def test_a_function_schema_comes_from_signature_and_docstring() -> None:
    assert ToolSchema(Search).openai == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.\n\nSlowly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "description": "what to look for, in a few words",
                    },
                    "depth": {"type": "integer", "description": "how many pages", "default": 1},
                },
                "required": ["query"],
            },
        },
    }


def test_the_short_docstring_form_and_annotated_strings_describe_parameters() -> None:
    def place(at: Annotated[int, "the position"], note: str) -> None:
        """Place it.

        note: any text: also with a colon
        """

    schema = ToolSchema(tool(place)).openai["function"]
    assert schema["description"] == "Place it."
    assert schema["parameters"]["properties"] == {
        "at": {"type": "integer", "description": "the position"},
        "note": {"type": "string", "description": "any text: also with a colon"},
    }


def test_nested_types_are_kept_whole_and_written_in_place() -> None:
    def draw(
        span: Span,
        points: list[Point],
        by_name: dict[str, Filter],
        unit: Unit,
        mode: Literal["fast", "exact"],
        pair: tuple[int, str],
        named: Pair,
        bound: Annotated[int, msgspec.Meta(ge=0, description="limit")],
        either: int | str | None,
    ) -> None: ...

    properties = schema_of(draw)["properties"]
    point = properties["points"]["items"]
    assert point["properties"]["x"] == {"type": "number", "description": "to the right"}
    assert point["required"] == ["x"]
    assert properties["span"]["properties"]["start"] == point
    assert properties["span"]["properties"]["stop"]["anyOf"] == [point, {"type": "null"}]
    assert properties["by_name"]["additionalProperties"]["properties"]["values"] == {
        "type": "array",
        "items": {"type": "integer"},
    }
    assert properties["by_name"]["additionalProperties"]["required"] == ["field"]
    assert (properties["unit"]["type"], properties["unit"]["enum"]) == ("string", ["ft", "m"])
    assert properties["mode"] == {"type": "string", "enum": ["exact", "fast"]}
    assert properties["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert properties["named"]["prefixItems"] == [{"type": "string"}, {"type": "integer"}]
    assert properties["bound"] == {"type": "integer", "minimum": 0, "description": "limit"}
    assert [kind["type"] for kind in properties["either"]["anyOf"]] == ["integer", "string", "null"]
    assert "$ref" not in json.dumps(properties)


def test_a_type_that_contains_itself_keeps_its_definition() -> None:
    def walk(node: Node) -> None: ...

    schema = schema_of(walk)
    assert schema["properties"]["node"] == {"$ref": "#/$defs/Node"}
    assert schema["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def test_a_type_may_be_called_like_the_tool() -> None:
    def Point_(at: Point) -> None: ...

    made = ToolSchema(tool(name="Point")(Point_))
    assert made.parameters["properties"]["at"]["properties"].keys() == {"x", "y"}


def test_untyped_parameters_and_defaults_of_any_kind_are_fine() -> None:
    def free(anything, some: list[int] = [1, 2], where: Point = Point(1.0)) -> None: ...  # type: ignore[no-untyped-def]  # noqa: B006, B008

    schema = schema_of(free)
    assert schema["properties"]["anything"] == {}
    assert schema["required"] == ["anything"]
    assert ToolSchema(tool(free)).validate({"anything": {"a": [1]}}) == {"anything": {"a": [1]}}


def test_arguments_are_converted_to_the_annotated_types() -> None:
    def draw(span: Span, unit: Unit, ratio: float, pair: tuple[int, str]) -> None: ...

    arguments = {
        "span": {"start": {"x": 1}},
        "unit": "ft",
        "ratio": 2,
        "pair": [1, "a"],
    }
    assert ToolSchema(tool(draw)).validate(arguments) == {
        "span": Span(Point(1.0)),
        "unit": Unit.FOOT,
        "ratio": 2.0,
        "pair": (1, "a"),
    }


def count(n: int, tags: list[str] | None = None, mode: Literal["a", "b"] = "a") -> str:
    """Count."""
    return str(n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing parameter `n` (parameters: n, tags, mode)"),
        ({"n": "3"}, "parameter `n`: expected `int`, got `str`"),
        ({"n": True}, "parameter `n`: expected `int`, got `bool`"),
        ({"n": None}, "parameter `n`: expected `int`, got `null`"),
        ({"n": 3.5}, "parameter `n`: expected `int`, got `float`"),
        ({"n": 1, "tags": [1]}, "parameter `tags`: expected `str`, got `int` - at `$[0]`"),
        (
            {"n": 1, "mode": "c"},
            'parameter `mode`: invalid enum value \'c\', must be one of ["a", "b"]',
        ),
        (
            {"n": 1, "tag": []},
            "unknown parameter `tag`, did you mean `tags`? (parameters: n, tags, mode)",
        ),
        ("{}", "arguments must be a JSON object"),
        ([], "arguments must be a JSON object"),
        (None, "arguments must be a JSON object"),
    ],
)
def test_bad_arguments_are_refused_with_a_message_that_names_the_parameter(
    arguments: Any, message: str
) -> None:
    with pytest.raises(ToolError) as caught:
        ToolSchema(tool(count)).validate(arguments)
    assert str(caught.value) == message


def test_an_integral_float_is_an_integer_at_any_depth() -> None:
    def add(n: int, many: list[dict[str, int]]) -> None: ...

    found = ToolSchema(tool(add)).validate({"n": 3.0, "many": [{"a": 4.0}]})
    assert found == {"n": 3, "many": [{"a": 4}]}
    assert type(found["n"]) is int


def test_a_message_stays_short_whatever_the_model_sends() -> None:
    with pytest.raises(ToolError) as caught:
        ToolSchema(tool(count)).validate({"n": 1, "mode": "x" * 100_000, "y" * 9_000: 1})
    assert len(str(caught.value)) <= 300


def test_arguments_nested_beyond_the_stack_are_refused() -> None:
    def keep(value: Any) -> None: ...

    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(ToolError, match="parameter `value`: nested too deeply"):
        ToolSchema(tool(keep)).validate({"value": deep})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.sampled_from(["n", "span", "tags", "x"]), JSON))
def test_any_json_is_either_fitted_to_the_types_or_refused(arguments: dict[str, Any]) -> None:
    def use(n: int, span: Span | None = None, tags: list[str] = []) -> None: ...  # noqa: B006

    before = json.dumps(arguments)
    try:
        found = ToolSchema(tool(use)).validate(arguments)
    except ToolError:
        pass
    else:
        assert type(found["n"]) is int
        assert isinstance(found.get("span"), Span | None)
        assert all(isinstance(tag, str) for tag in found.get("tags", []))
    assert json.dumps(arguments) == before


def test_the_model_can_neither_see_nor_give_what_the_row_gives() -> None:
    schema = ToolSchema(Search)
    row = schema.check_kwargs("execute", {"user": "u1"})
    assert schema.validate({"query": "q"}, fixed=row) == {"query": "q", "user": "u1"}
    for forged in ("user", "region"):
        with pytest.raises(ToolError, match=f"unknown parameter `{forged}`"):
            schema.validate({"query": "q", forged: "me"})


def test_the_object_itself_is_no_parameter_of_a_tool_that_takes_any() -> None:
    with pytest.raises(ToolError, match="unknown parameter `self`"):
        ToolSchema(Given).validate({"z": 1, "self": 1})


def test_a_row_may_fix_a_visible_parameter_and_wins_over_the_model() -> None:
    schema = ToolSchema(Search)
    row = schema.check_kwargs("execute", {"user": "u1", "query": "fixed"})
    assert schema.validate({"query": "mine"}, fixed=row)["query"] == "fixed"
    assert schema.validate({}, fixed=row)["query"] == "fixed"


def test_arguments_are_copied_so_that_a_tool_cannot_change_the_record() -> None:
    def keep(value: Any, **rest: Any) -> None: ...

    arguments = {"value": {"a": [1]}, "other": [2]}
    found = ToolSchema(tool(keep)).validate(arguments)
    found["value"]["a"].append(9)
    found["other"].append(9)
    assert arguments == {"value": {"a": [1]}, "other": [2]}


@pytest.mark.parametrize(
    ("hook", "kwargs", "message"),
    [
        (
            "create",
            {},
            "tools_kwargs['search'].create_kwargs: missing parameter `index`; "
            "create takes index, [limits]",
        ),
        ("create", {"index": 3}, "parameter `index`: expected `str`, got `int`"),
        (
            "create",
            {"index": "a", "limit": {}},
            "unknown parameter `limit`, did you mean `limits`?",
        ),
        ("execute", {}, "execute_kwargs: missing parameter `user`"),
        ("release", {"x": 1}, "release_kwargs: unknown parameter `x`; release takes no parameters"),
    ],
)
def test_row_kwargs_that_do_not_fit_name_tool_hook_and_field(
    hook: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ToolSchema(Search).check_kwargs(hook, kwargs)
    assert message in str(caught.value)


def test_row_values_that_are_not_json_pass_as_they_are() -> None:
    class Show(Tool):
        def create(self, image: bytes, many: Point | Span | None = None) -> None: ...
        def execute(self) -> None: ...

    image = object()
    assert ToolSchema(Show).check_kwargs("create", {"image": image}) == {"image": image}
    assert ToolSchema(Show).check_kwargs("create", {"image": image, "many": {"x": 1}})


class Given(Tool):
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {
            "z": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "r": {"$ref": "#/$defs/X"},
            "n": {"type": ["integer", "null"]},
            "mode": {"enum": ["a", "b"]},
            "free": True,
        },
        "required": ["z"],
        "additionalProperties": False,
        "$defs": {"X": {"type": "object"}},
    }

    def execute(self, **arguments: Any) -> str:
        return json.dumps(arguments)


def test_a_given_json_schema_is_shown_as_it_is() -> None:
    assert ToolSchema(Given).openai["function"]["parameters"] == Given.parameters


def test_the_handed_case_of_a_schema_without_types_is_accepted() -> None:
    """cfg-006: `anyOf`, `$ref`, and no `type` at the top or in a property."""
    properties = {
        "z": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "r": {"$ref": "#/$defs/X"},
    }

    class Loose(Tool):
        parameters = {"properties": properties}  # noqa: RUF012

        def execute(self, **arguments: Any) -> None: ...

    schema = ToolSchema(Loose)
    assert schema.parameters == {"properties": properties}
    assert schema.validate({"z": None, "r": {"any": 1}, "other": 2}) == {
        "z": None,
        "r": {"any": 1},
        "other": 2,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"z": 1, "r": {"k": 1}, "n": None, "mode": "a", "free": [1]}, None),
        ({"z": 1, "n": 2.0}, None),
        ({}, "missing parameter `z`"),
        ({"z": 1, "nn": 1}, "unknown parameter `nn`"),
        ({"z": 1, "n": "1"}, "parameter `n`: expected integer or null"),
        ({"z": 1, "n": True}, "parameter `n`: expected integer or null"),
        ({"z": 1, "mode": "c"}, 'parameter `mode`: must be one of ["a", "b"]'),
    ],
)
def test_arguments_are_checked_against_the_top_of_a_given_schema(
    arguments: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert ToolSchema(Given).validate(arguments) == arguments
        return
    with pytest.raises(ToolError) as caught:
        ToolSchema(Given).validate(arguments)
    assert str(caught.value).startswith(message)


def unschemable(z: complex) -> None: ...


def two_classes(z: Point | Span) -> None: ...


def positional(z: int, /) -> None: ...


def starred(*z: int) -> None: ...


def unresolvable(z: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("function", [unschemable, two_classes, positional, starred, unresolvable])
def test_a_tool_that_cannot_be_called_is_a_config_error_that_names_it(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigError, match=function.__name__) as caught:
        ToolSchema(tool(function))
    assert function is unresolvable or "'z'" in str(caught.value)


@pytest.mark.parametrize("schema", [{"properties": {1, 2}}, {"properties": []}, ["type"]])
def test_a_given_schema_that_is_none_is_a_config_error(schema: Any) -> None:
    with pytest.raises(ConfigError, match=r"'count'.*`parameters`"):
        ToolSchema(tool(parameters=schema)(count))


def test_a_tool_without_execute_is_a_config_error() -> None:
    class Nothing(Tool): ...

    with pytest.raises(ConfigError, match=r"'nothing': execute is not defined by .*Nothing"):
        ToolSchema(Nothing)


def test_a_return_annotation_need_not_resolve() -> None:
    def fine(n: int) -> NoSuchType: ...  # type: ignore[name-defined]  # noqa: F821

    assert schema_of(fine)["properties"]["n"] == {"type": "integer"}


def test_docstring_lines_that_only_look_like_parameters_stay_prose() -> None:
    text = "Do it.\n\nNote: this is prose.\nx: the one\n    and more\n\nThe end."
    assert read_docstring(text, ["x"]) == (
        "Do it.\n\nNote: this is prose.\n\nThe end.",
        {"x": "the one and more"},
    )
    assert read_docstring(None, ["x"]) == ("", {})
