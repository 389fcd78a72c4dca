"""TensorFlow Serving's protocol. Its messages are in ``tensorflow-serving-api``, which imports TensorFlow."""
