"""The service: everything between a socket and the evaluator.

Read a request's way in this order: `grpcio.server`, `grpcio.interceptors`, `grpcio.servicers`, then `dataplane`, which
knows no transport and calls the evaluator.
"""
