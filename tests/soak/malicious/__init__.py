"""Malicious checkpoints, written on the spot: what each would do is known, and can be seen."""

from soak.malicious import archives, hdf5_files, keras_files, tensorflow_files
from soak.malicious.harms import HARMS, Harm, describe, honest_model, publish_malicious
from soak.malicious.keras_files import rewrite_config
from soak.malicious.tensorflow_files import model_with_asset

WRITERS = (archives, hdf5_files, keras_files, tensorflow_files)
"""The modules whose import fills `HARMS`."""

__all__ = [
    "HARMS",
    "Harm",
    "describe",
    "honest_model",
    "model_with_asset",
    "publish_malicious",
    "rewrite_config",
]
