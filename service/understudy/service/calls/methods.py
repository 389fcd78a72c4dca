"""The methods of a service and their handlers, for any transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.call import CallContext
from understudy.service.calls.status import UnsupportedError
from understudy.service.handlers.request_templates import RequestTemplateCache
from understudy.service.metrics.rpc_metrics import RpcMethod, methods_of

Answer = Callable[[Any, CallContext], Awaitable[Any]]
"""Takes a request, or an iterator of requests, and returns the response."""
Stream = Callable[[Any, CallContext], AsyncGenerator[Any, None]]
"""Takes a request, or an iterator of requests, and yields responses."""
Requests = AsyncIterator[Any]
Admission = Callable[[CallContext], None]
"""Raises if a call would be refused whatever its request is; transports call it before the request arrives."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method.

    Attributes:
        rpc: Its names and kind.
        request_type: The class of its request messages.
        answer: Its handler: an `Answer`, or a `Stream` if ``rpc.streams_responses``.
        admit: The admission check of its calls, if any.
        template_cache: Parses requests that match a template, if set; the handler gets its result.
    """

    rpc: RpcMethod
    request_type: Any
    answer: Answer | Stream
    admit: Admission | None = None
    template_cache: RequestTemplateCache[Any, Any] | None = None

    def parse(self, data: bytes, begin: int = 0) -> Any:
        """Return the request in ``data[begin:]``: a message, or the result of the template cache.

        Raises:
            InvalidInputError: The bytes cannot be parsed.
        """
        template_cache = self.template_cache
        if template_cache is not None and (request := template_cache.match(data, begin)) is not None:
            return request
        data = data[begin:]
        message = self._parse(data)
        if template_cache is not None:
            template_cache.learn(data, message)
        return message

    def _parse(self, data: bytes) -> Any:
        try:
            return self.request_type.FromString(data)
        except DecodeError as error:
            raise InvalidInputError(
                f"cannot parse {len(data)} bytes as a request of {self.rpc.path}; encode it as its .proto says"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Service:
    """One service.

    Attributes:
        name: Its full name, such as ``package.Service``.
        methods: Its methods.
    """

    name: str
    methods: tuple[Method, ...]


def service(
    descriptor: ServiceDescriptor,
    answers: Mapping[str, Answer | Stream],
    admissions: Mapping[str, Admission] = MappingProxyType({}),
    template_caches: Mapping[str, RequestTemplateCache[Any, Any]] = MappingProxyType({}),
) -> Service:
    """Return a service.

    Args:
        descriptor: The service.
        answers: The handler of each method, by name.
        admissions: The admission checks of some methods, by name.
        template_caches: The template caches of some methods, by name.

    Raises:
        ValueError: A handler is missing or superfluous.
    """
    if answers.keys() != set(descriptor.methods_by_name):
        raise ValueError(
            f"{descriptor.full_name} has the methods {sorted(descriptor.methods_by_name)}; there are handlers for "
            f"{sorted(answers)}"
        )
    return foreign_service(descriptor, answers, admissions, template_caches)


def foreign_service(
    descriptor: ServiceDescriptor,
    answers: Mapping[str, Answer | Stream],
    admissions: Mapping[str, Admission] = MappingProxyType({}),
    template_caches: Mapping[str, RequestTemplateCache[Any, Any]] = MappingProxyType({}),
) -> Service:
    """Return a service of another project, whose methods depend on the installed version of its package.

    A method without a handler is left out, and every front end returns UNIMPLEMENTED for it. A handler of a method that
    the installed version lacks is left out too.

    Args:
        descriptor: The service.
        answers: The handlers of its methods, by name.
        admissions: The admission checks of some methods, by name.
        template_caches: The template caches of some methods, by name.
    """
    descriptors: dict[str, MethodDescriptor] = dict(descriptor.methods_by_name)
    methods = tuple(
        Method(
            rpc=rpc,
            request_type=GetMessageClass(descriptors[rpc.name].input_type),
            answer=answers[rpc.name],
            admit=admissions.get(rpc.name),
            template_cache=template_caches.get(rpc.name),
        )
        for rpc in methods_of(descriptor)
        if rpc.name in answers
    )
    return Service(name=descriptor.full_name, methods=methods)


def refusals(sentences: Mapping[str, str]) -> dict[str, Answer]:
    """Return a handler that refuses, for each unsupported method.

    Args:
        sentences: What to do instead, by method name.
    """
    return {name: _refusal(sentence) for name, sentence in sentences.items()}


def _refusal(sentence: str) -> Answer:
    async def refuse(_request: Any, _call: CallContext) -> Any:
        raise UnsupportedError(sentence)

    return refuse
