"""The Open Inference Protocol: tensors and requests in its words, for its gRPC service and its REST form alike."""
