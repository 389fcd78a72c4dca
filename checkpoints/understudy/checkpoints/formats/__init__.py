"""The formats of foreign checkpoints, one module each."""

from understudy.checkpoints.formats.format import Content, Format
from understudy.checkpoints.formats.saved_model import SavedModelFolder
from understudy.checkpoints.formats.single_file import SingleFile
from understudy.checkpoints.formats.tf_checkpoint import TensorFlowCheckpoint
from understudy.checkpoints.formats.unread import unread_reason
from understudy.checkpoints.kinds import ModelKind

HDF5_SETTLE_SECONDS = 0.02
"""HDF5 has no checksums, so two writes within one tick of the file system's clock must be ruled out."""

FORMATS: tuple[Format, ...] = (
    SingleFile(kind=ModelKind.KERAS, suffix=".keras"),
    SingleFile(kind=ModelKind.WEIGHTS, suffix=".weights.h5", settle_seconds=HDF5_SETTLE_SECONDS),
    SingleFile(
        kind=ModelKind.HDF5,
        suffix=".h5",
        not_suffix=".weights.h5",
        settle_seconds=HDF5_SETTLE_SECONDS,
    ),
    TensorFlowCheckpoint(),
    SavedModelFolder(),
)

__all__ = ["FORMATS", "Content", "Format", "unread_reason"]
