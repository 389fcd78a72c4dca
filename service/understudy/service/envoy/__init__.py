"""The envoy front end: an ASGI application that pyvoy runs inside Envoy, which serves HTTP/2.

At startup, `launch` turns this process into Envoy and `host` re-runs the program inside it, where `envoy_server`
replaces `grpcio.grpc_server`. A call passes through `asgi_app`, `asgi_endpoint`, and the handlers.
"""
