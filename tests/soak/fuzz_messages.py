"""Requests that are almost valid, barely valid, and invalid."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

WORDS: Final = (
    *("", "x", "y", "z", "in_int8", "out_bool", "plain", "every", "nobody", "serving", "latest", "best"),
    *("0", "1", "3", "7", "99", "-1", "1e3", "9" * 30, "ü", "\0", "x" * 3000, "{}", '{"k": 3}', "["),
    *("FP32", "FP16", "BF16", "BYTES", "BOOL", "INT8", "UINT64", "FP31"),
    *("timeout", "priority", "sequence_id", "classification", "shared_memory_region", "binary_data_size"),
    *("function", "MeanMetricWrapper", "AUC", '{"num_thresholds": 60000000}', '{"fn": "mse"}'),
    *("serving_default", "signature_def", "loss", "mae", "accuracy", "mean_squared_error", "test"),
)
NUMBERS: Final = (0, 1, 2, 3, 4, 7, 9, 12, -1, -2, 64, 255, 256, 2**15, 2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1)
REALS: Final = (0.0, -0.0, 1.0, -1.5, 1e-45, 3.4e38, 1e300, float("inf"), float("-inf"), float("nan"))
SIZES: Final = (0, 1, 2, 3, 4, 7, 8, 12, 24, 36, 96, 1000)

_DEEPEST: Final = 4
_LIMITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def fuzzed(kind: type[Message], right: list[Message], chance: random.Random) -> bytes:
    """Return the bytes of a request.

    Args:
        kind: The request's message.
        right: Valid requests.
        chance: The random numbers.
    """
    draw = chance.random()
    if draw < 0.05:
        return chance.randbytes(chance.choice(SIZES))
    message = kind()
    if right and draw < 0.75:
        message.CopyFrom(chance.choice(right))
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            change_a_field(message, chance)
    else:
        fill(message, chance)
    content = message.SerializeToString()
    return _damaged(content, chance) if chance.random() < 0.15 else content


def fill(message: Any, chance: random.Random, depth: int = 0) -> None:
    """Set some fields of a message to random values."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.6:
            _set(message, field, chance, depth)


def change_a_field(message: Any, chance: random.Random) -> None:
    """Change one field of a message, or of a nested one."""
    within = chance.choice(list(_messages(message)))
    if not within.DESCRIPTOR.fields:
        return
    field = chance.choice(within.DESCRIPTOR.fields)
    within.ClearField(field.name)
    if chance.random() < 0.7:
        _set(within, field, chance, depth=2)


def _messages(message: Any) -> Iterator[Any]:
    """Yield a message and its nested messages."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if _is_map(field):
            if field.message_type.fields_by_name["value"].message_type is not None:
                for each in value.values():
                    yield from _messages(each)
        elif field.is_repeated:
            for each in iter(value):
                yield from _messages(each)
        else:
            yield from _messages(value)


def _set(message: Message, field: Any, chance: random.Random, depth: int) -> None:
    target = getattr(message, field.name)
    if _is_map(field):
        _fill_map(target, field, chance, depth)
    elif field.message_type is not None and depth > _DEEPEST:
        return
    elif field.is_repeated and field.message_type is not None:
        for _ in range(chance.randrange(3)):
            fill(target.add(), chance, depth + 1)
    elif field.is_repeated:
        target.extend(_scalar(field, chance) for _ in range(chance.choice((0, 1, 2, 3, 6, 9, 70))))
    elif field.message_type is not None:
        target.SetInParent()
        fill(target, chance, depth + 1)
    else:
        setattr(message, field.name, _scalar(field, chance))


def _fill_map(target: Any, field: Any, chance: random.Random, depth: int) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    for _ in range(chance.randrange(3)):
        chosen = _scalar(key, chance)
        if value.message_type is None:
            target[chosen] = _scalar(value, chance)
        elif depth <= _DEEPEST:
            made = GetMessageClass(value.message_type)()
            fill(made, chance, depth + 1)
            target[chosen].CopyFrom(made)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _scalar(field: Any, chance: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice(SIZES))
        case FieldDescriptor.CPPTYPE_STRING:
            return chance.choice(WORDS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return chance.choice(REALS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice((*(value.number for value in field.enum_type.values), 77))
        case number:
            low, high = _LIMITS[number]
            return min(high, max(low, chance.choice(NUMBERS)))


def _damaged(content: bytes, chance: random.Random) -> bytes:
    """Flip a bit, or truncate."""
    if not content:
        return content
    damaged = bytearray(content)
    place = chance.randrange(len(damaged))
    if chance.random() < 0.5:
        return bytes(damaged[:place])
    damaged[place] ^= 1 << chance.randrange(8)
    return bytes(damaged)
