"""Records as they reach a store from a state actor."""

from gym_capture.codec import encode_delta
from gym_capture.operations import Commit
from gym_capture.records import TokenEntry


def encoded_commit(entry: TokenEntry, epoch: int) -> Commit:
    return Commit(entry, epoch=epoch, encoded=encode_delta(entry))
