"""The field numbers of a protocol. As a program, in tritonclient's environment, it prints tritonclient's."""

from __future__ import annotations

import json
from typing import Any


def numbers_of(message: Any, prefix: str = "") -> dict[str, Any]:
    """Return the number and the type of every field of a message and of its nested messages."""
    name = f"{prefix}{message.name}"
    numbers = {f"{name}.{field.name}": [field.number, field.type] for field in message.fields}
    for nested in message.nested_types:
        numbers |= numbers_of(nested, f"{name}.")
    for enum in message.enum_types:
        numbers |= {f"{name}.{enum.name}.{value.name}": [value.number, 0] for value in enum.values}
    return numbers


def description(*modules: Any) -> dict[str, Any]:
    """Return the numbers of everything in these modules, and the methods of the service in the last."""
    found: dict[str, Any] = {}
    for module in modules:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            found |= numbers_of(message)
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            found |= {f"{enum.name}.{value.name}": [value.number, 0] for value in enum.values}
    (service,) = modules[-1].DESCRIPTOR.services_by_name.values()
    methods = {
        method.name: [method.client_streaming, method.server_streaming, method.input_type.full_name]
        for method in service.methods
    }
    return {"fields": found, "service": service.full_name, "methods": methods}


if __name__ == "__main__":
    from tritonclient.grpc import model_config_pb2, service_pb2

    print(json.dumps(description(model_config_pb2, service_pb2)))
