"""NumPy arrays as tensors on the wire, for client and server alike."""

from __future__ import annotations

from understudy.wire.dtypes import WireError, data_type, dtype_name, fixed_size_dtype, on_the_wire
from understudy.wire.tensor_codec import (
    Contents,
    check_count,
    check_shape,
    decode,
    decode_all,
    encode,
    encode_all,
    from_content,
    from_elements,
    numbers,
    strings,
)

__all__ = [
    "Contents",
    "WireError",
    "check_count",
    "check_shape",
    "data_type",
    "decode",
    "decode_all",
    "dtype_name",
    "encode",
    "encode_all",
    "fixed_size_dtype",
    "from_content",
    "from_elements",
    "numbers",
    "on_the_wire",
    "strings",
]
