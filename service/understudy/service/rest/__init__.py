"""The REST form of the Open Inference Protocol, with the binary tensor extension, on the HTTP port."""
