"""The Open Inference Protocol: tensors and requests, for its gRPC service and its REST form."""
