"""Messages of a chat as templates expect them, and which of them are learned."""

import json
from collections.abc import Mapping
from typing import Any

WRITTEN_KEYS = (
    "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal",
)  # fmt: skip
"""Keys of a message that say something a template must write."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles whose spelling decides; templates may know others."""
_OTHER_WEIGHTS = ("train", "training", "train_on_turn", "train_detail", "loss")

Message = dict[str, Any]


def chat_messages(messages: Any) -> list[Message]:
    """Check messages, and write them as templates expect them.

    Nulls are left out (content that is missing next to tool calls is empty), parts of text are
    one text, and arguments of tool calls are mappings, which some data sets keep as JSON.

    Raises:
        ValueError: a message has no role or no content, a content that is not text, a weight that
            is not 0 or 1, or tool calls that cannot be read.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages is {type(messages).__name__}: needed is a list of at least one message"
        )
    return [_message(number, message) for number, message in enumerate(messages)]


def is_learned(message: Message) -> bool:
    """Return whether a message is an answer to learn: the assistant's, without `weight: 0`."""
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def said_beside_content(message: Message) -> list[str]:
    """Return the keys that a template must write, too; a tool's name is that of its call."""
    keys = WRITTEN_KEYS if message["role"] in ("tool", "function") else (*WRITTEN_KEYS, "name")
    return [key for key in keys if message.get(key)]


def as_templates_see(message: Message) -> Message:
    """Return the message without the weight, which says nothing to a template."""
    return {key: value for key, value in message.items() if key != "weight"}


def tool_list(given: Any) -> list[Any] | None:
    """Return the tools of a row, also from JSON; None if there are none.

    Raises:
        ValueError: they are no list, or no JSON.
    """
    found = _from_json("tools", given)
    if not found:
        return None
    if not isinstance(found, list):
        raise ValueError(f"tools is {type(found).__name__}: needed is a list of tools")
    return [_from_json("tools", tool) for tool in found]


def _message(number: int, given: Any) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ValueError(f"message {number} has no role: needed are role and content")
    if (role := given["role"]) not in ROLES and role.strip().lower() in ROLES:
        raise ValueError(f"the role of message {number} is {role!r}: write {role.strip().lower()}")
    message = {key: value for key, value in given.items() if value is not None}
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(number, message["tool_calls"])
    if "content" not in message and any(message.get(key) for key in WRITTEN_KEYS):
        message["content"] = ""
    if "content" not in message:
        raise ValueError(f"message {number} has no content: needed are role and content")
    message["content"] = _text(number, message["content"])
    _check_weight(number, message)
    return message


def _text(number: int, content: Any) -> str:
    """Return a content, or its parts together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"content of message {number} is {type(content).__name__}: needed is a text"
        )
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(
                f"content of message {number} has a part of type {kind!r}: only parts of text are "
                "read"
            )
    return "".join(part["text"] for part in content)


def _check_weight(number: int, message: Message) -> None:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(
            f"weight of message {number} is {weight!r}: 1 learns an answer, 0 does not"
        )
    if message["role"] != "assistant" and message.get("weight") == 1:
        raise ValueError(
            f"weight of message {number} is 1, but its role is {message['role']!r}: only answers "
            "of the assistant are learned; leave it out, or write 0"
        )
    for key in _OTHER_WEIGHTS:
        if key in message:
            raise ValueError(
                f"message {number} has the key {key!r}, which is not read: write weight: 0 for an "
                "answer that is not learned, and leave the key out"
            )


def _tool_calls(number: int, calls: Any) -> list[Any]:
    """Return tool calls whose arguments are mappings."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"tool_calls of message {number} are no list of mappings")
    found = []
    for call in map(dict, calls):
        inner = call.get("function")
        if isinstance(inner, Mapping):
            call["function"] = _with_arguments(number, dict(inner))
        found.append(_with_arguments(number, call))
    return found


def _with_arguments(number: int, call: Message) -> Message:
    if "arguments" in call:
        name = f"arguments of a tool call of message {number}"
        given = call["arguments"]
        empty = given is None or (isinstance(given, str) and not given.strip())
        arguments = {} if empty else _from_json(name, given)
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{name} are {type(arguments).__name__}: needed is a mapping")
        call["arguments"] = arguments
    return call


def _from_json(name: str, given: Any) -> Any:
    if not isinstance(given, str) or not given.strip():
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: this is no JSON ({error})") from error
