"""The devices of a process: CUDA's libraries, which devices to use, and what is wrong when there is no GPU.

The service and the trainer share it. It decides and lays out before TensorFlow starts; afterwards TensorFlow cannot
change its devices. Importing this package does not import TensorFlow.
"""
