"""Python functions as tools: their descriptions from type hints and docstrings.

The JSON schema that the policy sees and the validation of arguments come from the hints (pydantic).

Reading order: make_tools, Tool.
"""

from __future__ import annotations

import inspect
import json
import re  # house: ok names of the user's functions
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, to_jsonable_python

from burnish.config.explain import nearest
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.docstrings import read_docstring
from burnish.environments.importing import LoadError, load_object

CODE_TOOL = "python"
"""Name of the built-in tool that runs code."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """Description for the chat template: ``{"type": "function", "function": {"name", "description",
    "parameters"}}``."""
    arguments: type[BaseModel]
    """Model of the arguments. The alias of each field is the name of a parameter."""
    is_method: bool = False
    """True if the first parameter is the environment."""
    without_default: frozenset[str] = frozenset()
    """Fields of ``arguments`` whose parameters have no default in Python."""

    @property
    def origin(self) -> str:
        """Place of the definition, for messages."""
        return _origin(self.function)

    def validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as keyword arguments: those of the call, and the defaults that only
        the hint knows. Raises pydantic.ValidationError."""
        model = self.arguments.model_validate(dict(arguments))
        fields = self.arguments.model_fields
        passed = model.model_fields_set | self.without_default
        values = dict(model)
        return {str(fields[name].alias): values[name] for name in fields if name in passed}


def make_tools(
    specs: Sequence[str | Callable[..., Any]], owner: type | None = None
) -> dict[str, Tool]:
    """Return name -> tool. ``owner``: class in which names of methods are looked up.

    Raises EnvironmentSetupError if a function cannot be loaded, lacks a docstring or type hints,
    has a parameter that JSON cannot express, or has the name of another tool.
    """
    tools: dict[str, Tool] = {}
    for spec in specs:
        tool = _tool_of(spec, owner)
        if tool.name in tools and tools[tool.name].function is not tool.function:
            other = tools[tool.name]
            raise EnvironmentSetupError(
                f"two tools have the name {tool.name!r} ({other.origin} and {tool.origin}); the "
                "policy could not tell them apart. Rename one of the functions"
            )
        tools[tool.name] = tool
    return tools


def _tool_of(spec: str | Callable[..., Any], owner: type | None) -> Tool:
    if callable(spec):
        return _make_tool(spec, False)
    if ":" in spec:
        try:
            function = load_object(spec)
        except LoadError as error:
            raise EnvironmentSetupError(f"tool {error}") from error
        return _make_tool(function, False)
    members = inspect.getmembers(owner) if owner else ()
    methods = {name: m for name, m in members if inspect.isfunction(m) or inspect.ismethod(m)}
    if spec not in methods:
        raise EnvironmentSetupError(
            f"tool {spec!r} is neither path/to/file.py:function nor package.module:function, nor "
            f"the built-in tool {CODE_TOOL}, nor a method of "
            f"{owner.__name__ if owner else 'the environment'}"
            f"{nearest(spec, (*methods, CODE_TOOL))}"
        )
    of_class = isinstance(inspect.getattr_static(owner, spec), (staticmethod, classmethod))
    return _make_tool(methods[spec], not of_class)


@lru_cache(maxsize=1024)
def _make_tool(function: Callable[..., Any], is_method: bool) -> Tool:
    if not inspect.isroutine(function) or not _NAME.fullmatch(function.__name__):
        raise EnvironmentSetupError(
            f"tool {function!r:.80} is not a function with a name; define it with `def`"
        )
    name = function.__name__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise EnvironmentSetupError(
            f"tool {name} ({_origin(function)}) is a generator function; a call has one result, so "
            "return a list instead of yielding its items"
        )
    parameters = list(inspect.signature(function).parameters.values())[int(is_method) :]
    texts = read_docstring(inspect.getdoc(function) or "", [p.name for p in parameters])
    if not texts.description:
        raise EnvironmentSetupError(
            f"tool {name} ({_origin(function)}) has no docstring; the policy reads it to learn "
            "what the tool does. Add one, with the parameters under `Args:`"
        )
    arguments = _argument_model(function, parameters, texts.parameters)
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": texts.description,
            "parameters": _parameter_schema(function, arguments),
        },
    }
    defaults = [_default(parameter) for parameter in parameters]
    needed = frozenset(_field(number) for number, value in enumerate(defaults) if value is ...)
    return Tool(name, function, schema, arguments, is_method, needed)


def _parameter_schema(function: Callable[..., Any], arguments: type[BaseModel]) -> dict[str, Any]:
    try:
        schema = arguments.model_json_schema(schema_generator=_ToolSchema)
    except Exception as error:
        raise _no_schema(function, error) from error
    try:
        json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise EnvironmentSetupError(
            f"tool {function.__name__} ({_origin(function)}): the JSON schema of its parameters "
            "has a number that is not finite, which JSON does not have; remove it from the "
            "examples and enums of the type hints"
        ) from error
    for key in ("title", "additionalProperties"):  # (unknown arguments are refused by the model)
        schema.pop(key, None)
    return schema


class _ToolSchema(GenerateJsonSchema):
    """Schemas without titles, which repeat the names of parameters, and without defaults that JSON
    cannot express (pydantic warns of them). Sets are sorted, so that a prompt does not differ from
    process to process."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        try:
            json.dumps(to_jsonable_python(dft, inf_nan_mode="constants"), allow_nan=False)
        except ValueError as error:
            raise PydanticSerializationError(str(error)) from error
        return _with_sorted_sets(dft, super().encode_default(dft))


def _with_sorted_sets(value: Any, encoded: Any) -> Any:
    """Return the JSON value ``encoded`` of ``value`` with sets, also nested ones, in one order."""
    if isinstance(value, (set, frozenset)):
        pairs = zip(value, encoded, strict=True)
        items = [_with_sorted_sets(item, encoded_item) for item, encoded_item in pairs]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
    is_object = is_dataclass(value) or isinstance(value, BaseModel)
    parts = list(vars(value).values()) if is_object else value
    parts = list(value.values()) if isinstance(value, dict) else parts
    if not isinstance(parts, (list, tuple)) or len(parts) != len(encoded):
        return encoded
    if isinstance(encoded, dict):
        pairs = zip(parts, encoded.items(), strict=True)
        return {key: _with_sorted_sets(part, of_part) for part, (key, of_part) in pairs}
    return [_with_sorted_sets(*pair) for pair in zip(parts, encoded, strict=True)]


def _argument_model(
    function: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    texts: Mapping[str, str],
) -> type[BaseModel]:
    """Return a model with one field per parameter. Fields have internal names, because a model
    cannot have every name that a parameter can."""
    where = f"tool {function.__name__} ({_origin(function)})"
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise EnvironmentSetupError(
            f"{where}: its type hints cannot be evaluated: {type(error).__name__}: {error}"
        ) from error
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvironmentSetupError(
                f"{where}: the parameter {parameter.name!r} cannot be passed by name; the "
                "policy names all arguments, so write each parameter out"
            )
        if parameter.name not in hints:
            raise EnvironmentSetupError(
                f"{where}: the parameter {parameter.name!r} has no type hint, so the policy would "
                "not learn what to pass; write e.g. `" + parameter.name + ": str`"
            )
        hint = hints[parameter.name]
        if isinstance(parameter.default, FieldInfo):
            hint = Annotated[hint, parameter.default]
        name, text = parameter.name, texts.get(parameter.name)
        more: dict[str, Any] = {"description": text} if text else {}
        more |= {"alias": name, "validation_alias": name, "serialization_alias": name}
        fields[_field(number)] = (hint, Field(_default(parameter), **more))
    try:
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:
        raise _no_schema(function, error) from error


def _field(number: int) -> str:
    """Return the name of the field of a parameter."""
    return f"argument_{number}"


def _default(parameter: inspect.Parameter) -> Any:
    """Return the default of a parameter in Python, or ``...`` if there is none. One that
    ``pydantic.Field`` describes belongs to the hint."""
    is_none = parameter.default is parameter.empty or isinstance(parameter.default, FieldInfo)
    return ... if is_none else parameter.default


def _no_schema(function: Callable[..., Any], error: Exception) -> EnvironmentSetupError:
    reason = str(error).partition("\n")[0]
    return EnvironmentSetupError(
        f"tool {function.__name__} ({_origin(function)}): its parameters have no JSON schema "
        f"({reason}); use str, int, float, bool, list, dict, Literal, enums or pydantic models"
    )


def _origin(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
