"""Records as they reach a store from a state actor."""

from gym_capture.capture.codec import encode_suffix
from gym_capture.capture.operations import Commit
from gym_capture.capture.records import TokenEntry


def encoded_commit(entry: TokenEntry, epoch: int) -> Commit:
    return Commit(entry, epoch=epoch, encoded=encode_suffix(entry))
