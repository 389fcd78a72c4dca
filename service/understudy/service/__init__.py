"""The service: everything between a socket and the evaluator.

Read a request's way in this order: a front end (`grpcio.server` and `grpcio.endpoint`), `services`, which says what
answers each method, then `handlers`, which knows no transport and calls the evaluator.
"""
