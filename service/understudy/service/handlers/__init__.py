"""The implementation of each RPC, from request message to response message, independent of the transport.

Front ends decode bytes into messages, call these functions on the event loop, and turn exceptions into a status with
`failures.failure_of`.
"""
