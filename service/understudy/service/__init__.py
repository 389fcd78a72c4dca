"""The service: everything between a socket and the evaluator.

A request passes through a front end (`grpcio`, `envoy`, `rest`), `calls`, which does what every call needs, and
`handlers`, which know no transport and call the evaluator. `services` is the table of methods; `server` starts all of
them.
"""
