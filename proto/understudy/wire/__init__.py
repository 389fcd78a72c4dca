"""NumPy arrays as tensors on the wire, for client and server alike."""

from __future__ import annotations

from understudy.wire.codec import decode, decode_all, encode, encode_all
from understudy.wire.dtypes import WireError, data_type, dtype_name

__all__ = ["WireError", "data_type", "decode", "decode_all", "dtype_name", "encode", "encode_all"]
