"""The fast path of predictions: codecs that reuse the bytes of earlier requests and responses.

Without this package, `understudy.service.services.plain_codecs` answers the same; only `server` refers to it.
"""
