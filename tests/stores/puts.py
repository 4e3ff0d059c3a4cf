"""Records as they reach a store from a state actor."""

from gym_capture.codec import encode_suffix
from gym_capture.protocols import EncodedPut
from gym_capture.records import TokenEntry


def encoded_put(entry: TokenEntry, epoch: int) -> EncodedPut:
    return EncodedPut(entry, encode_suffix(entry), epoch)
