"""TensorFlow Serving's protocol. Its messages come with ``tensorflow-serving-api``, which loads TensorFlow."""
