"""The implementation of each RPC, independent of the transport and of the encoding of messages.

Front ends decode bytes with a method's codec, call these functions on the event loop, and encode what they return.
"""
