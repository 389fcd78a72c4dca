"""The devices of a process: CUDA's libraries, the choice of devices, and a diagnosis when there is no GPU.

The service and the trainer share this package. It configures devices before TensorFlow starts, as TensorFlow cannot
change them afterwards. Importing it does not import TensorFlow.
"""
