"""The temporary folders of `understudy.checkpoints`, for the service, which does not import that layer."""

from understudy.checkpoints.temporary_folders import TemporaryFolder as TemporaryFolder  # noqa: PLC0414
from understudy.checkpoints.temporary_folders import delete_abandoned as delete_abandoned  # noqa: PLC0414
from understudy.checkpoints.temporary_folders import delete_folder as delete_folder  # noqa: PLC0414
