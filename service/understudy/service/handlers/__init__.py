"""What each RPC does, from its request message to its response message, without any transport.

Front ends decode bytes into messages, call these functions on the event loop, and turn exceptions into a status with
`failures.failure_of`.
"""
