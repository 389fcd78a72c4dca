"""What happens around every call, one concern each, in the order of `understudy.service.grpcio.server`."""
