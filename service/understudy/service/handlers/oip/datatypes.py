"""The protocol's names of element types, and the fields of their elements."""

from __future__ import annotations

from collections.abc import Mapping

from understudy.oip import model_config_pb2
from understudy.wire import WireError

BYTES = "BYTES"
BOOL = "BOOL"

DATATYPES: Mapping[str, str] = {
    "bool": BOOL,
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "string": BYTES,
}
"""The protocol's datatype by a signature's dtype."""

_DTYPES: Mapping[str, str] = {datatype: dtype for dtype, datatype in DATATYPES.items()}

CONTENTS_FIELDS: Mapping[str, str] = {
    BOOL: "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""The field of InferTensorContents for each datatype that has one."""


def dtype_of(datatype: str, name: str) -> str:
    """Return a signature's dtype for a datatype of the protocol.

    Raises:
        WireError: The protocol has no such datatype; the text names the tensor.
    """
    try:
        return _DTYPES[datatype]
    except KeyError:
        raise WireError(f"{name}: datatype {datatype!r} is unknown; expected one of {', '.join(_DTYPES)}") from None


def config_type(dtype: str) -> model_config_pb2.DataType.ValueType:
    """Return a model configuration's DataType for a signature's dtype."""
    datatype = DATATYPES[dtype]
    return model_config_pb2.DataType.Value("TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}")
