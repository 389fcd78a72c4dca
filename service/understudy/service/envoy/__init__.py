"""The envoy front end: an ASGI application that pyvoy runs inside Envoy, which has the HTTP/2.

The way there: `launch` makes Envoy of this process, `host` runs the program again inside it, where `server` takes the
place of `grpcio.server`. A call's way: `app`, `endpoint`, then the handlers.
"""
