"""The grpcio front end: grpc.aio on the event loop."""
