"""The service: everything between a socket and the evaluator.

A request passes through a front end (`grpcio.grpc_server` and `grpcio.grpc_endpoint`), `services`, which maps each
method to its handler, and `handlers`, which know no transport and call the evaluator.
"""
