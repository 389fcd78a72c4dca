"""The envoy front end: an ASGI application that pyvoy runs inside Envoy, which serves HTTP/2.

`launch` turns this process into Envoy, which re-runs the program inside it; `envoy_server` is the front end there. A
call passes through `asgi_app` and `asgi_call`, with the bytes of `grpc_wire`.
"""
