"""What an earlier version wrote: its bytes are read as what they said, and the same records give the same bytes.

The bytes below are of version 0.1, made once. They are never made anew: they are what stands on disks.
"""

from __future__ import annotations

import base64

import numpy as np

from gym_capture.capture.codec import decode_entry, decode_intent, encode_entry, encode_intent, encode_suffix
from gym_capture.capture.records import (
    CallIntent,
    Continues,
    LostCall,
    RecordProblem,
    Unresolved,
    WeightSpan,
    as_ids,
    digest_ids,
)
from gym_capture.capture.snapshot_codec import decode_snapshot
from tests.calls import entry_of

ROOT = (
    b"R0NFTgEAAADQAAAACAAAAAAAAAAAAAAAoQrWTgR/05fNNf8tAL8xv3sicm9sbG91dF9pZCI6InIxIiwibW9kZWxfY2FsbF9pZCI6ImEiLCJt"
    b"b2RlbCI6IiIsInJlcXVlc3RlZF9tb2RlbCI6IiIsImhhc190b29scyI6ZmFsc2UsImFycmF5cyI6W1sicHJvbXB0X3Rva2VuX2lkcyIsIjxp"
    b"NCIsWzNdXSxbImdlbmVyYXRpb25fdG9rZW5faWRzIiwiPGk0IixbMl1dLFsiZ2VuZXJhdGlvbl9sb2dfcHJvYnMiLCI8ZjQiLFsyXV1dfSAg"
    b"ICAgICBbXSAgICAgIAEAAAACAAAAAwAAAAAAAAAEAAAABQAAAAAAAL8AAIC+"
)
WHOLE = (
    b"R0NFTgEAAADoAgAAKAAAAAAAEED8VNlBJItFN3KRGX8pqzm03pJMHXsicm9sbG91dF9pZCI6InIxIiwibW9kZWxfY2FsbF9pZCI6ImLtoL0i"
    b"LCJtb2RlbCI6InBvbGljeSIsInJlcXVlc3RlZF9tb2RlbCI6InNtYWxsIiwiaGFzX3Rvb2xzIjp0cnVlLCJ0b2tlbl9pdGVtX2luZGV4Ijow"
    b"LCJ0dXJuX2tleSI6InQiLCJhc2tlZF9rZXkiOiJxIiwiZGlnZXN0IjoiYjJmZTdhMmFiZjU0OWQ5NjM0MmVlY2EzYjkzODIxMTU4NDE2MzBl"
    b"MDUzNzc2ODU2MzU2YjkzMjZmMWZiODk3NCIsImZpbmlzaF9yZWFzb24iOiJzdG9wIiwic3RvcF9yZWFzb24iOiI3IiwiZGVsaXZlcmVkIjpm"
    b"YWxzZSwicHJlZml4X3JlcXVlc3RlZCI6dHJ1ZSwicHJlZml4X3N1cHBsaWVkIjp0cnVlLCJtYXhfdG9rZW5zIjowLCJwYXJlbnQiOlsiY29u"
    b"dGludWVzIiwiYSIsNV0sIndlaWdodF92ZXJzaW9ucyI6W1swLDEsIjEiXSxbMSwzLCIyIl1dLCJzYW1wbGluZyI6eyJ0ZW1wZXJhdHVyZSI6"
    b"MS4wLCJzZWVkIjoxMTgwNTkxNjIwNzE3NDExMzAzNDI0fSwibm9ybWFsaXplZCI6WyJiaWxsaW5nX2hlYWRlciIsIngiXSwib3RoZXJfdHVy"
    b"bl9rZXlzIjp7InQyIjoic3RvcF9zdHJpbmdfcHV0X2JhY2sifSwiYXJyYXlzIjpbWyJwcm9tcHRfdG9rZW5faWRzIiwiPGk0IixbN11dLFsi"
    b"Z2VuZXJhdGlvbl90b2tlbl9pZHMiLCI8aTQiLFszXV0sWyJnZW5lcmF0aW9uX2xvZ19wcm9icyIsIjxmNCIsWzNdXSxbInJvdXRlZF9leHBl"
    b"cnRzIiwiPGkyIixbOSwyLDFdXSxbInNhbXBsaW5nX21hc2siLCJ8YjEiLFszLDJdXV19ICAgIFt7InR5cGUiOiJtZXNzYWdlIiwidGV4dCI6"
    b"ImNhZsOpIO2gvSJ9XSABAAAAAgAAAAMAAAAEAAAABQAAAAYAAAAHAAAAAAAAAAgAAAAJAAAACgAAAAAAAAAAAAC+AAAAwAAAAAAAAAAAAAAB"
    b"AAIAAwAEAAUABgAHAAgACQAKAAsADAANAA4ADwAQABEAAAAAAAEAAQABAAAA"
)
SUFFIX = (
    b"R0NFTgEAAAD4AgAAKAAAAAAAEED8VNlB9rmxZwiH4SF2HLp8T0h8R3sicm9sbG91dF9pZCI6InIxIiwibW9kZWxfY2FsbF9pZCI6ImLtoL0i"
    b"LCJtb2RlbCI6InBvbGljeSIsInJlcXVlc3RlZF9tb2RlbCI6InNtYWxsIiwiaGFzX3Rvb2xzIjp0cnVlLCJwcm9tcHRfb2Zmc2V0Ijo1LCJ0"
    b"b2tlbl9pdGVtX2luZGV4IjowLCJ0dXJuX2tleSI6InQiLCJhc2tlZF9rZXkiOiJxIiwiZGlnZXN0IjoiYjJmZTdhMmFiZjU0OWQ5NjM0MmVl"
    b"Y2EzYjkzODIxMTU4NDE2MzBlMDUzNzc2ODU2MzU2YjkzMjZmMWZiODk3NCIsImZpbmlzaF9yZWFzb24iOiJzdG9wIiwic3RvcF9yZWFzb24i"
    b"OiI3IiwiZGVsaXZlcmVkIjpmYWxzZSwicHJlZml4X3JlcXVlc3RlZCI6dHJ1ZSwicHJlZml4X3N1cHBsaWVkIjp0cnVlLCJtYXhfdG9rZW5z"
    b"IjowLCJwYXJlbnQiOlsiY29udGludWVzIiwiYSIsNV0sIndlaWdodF92ZXJzaW9ucyI6W1swLDEsIjEiXSxbMSwzLCIyIl1dLCJzYW1wbGlu"
    b"ZyI6eyJ0ZW1wZXJhdHVyZSI6MS4wLCJzZWVkIjoxMTgwNTkxNjIwNzE3NDExMzAzNDI0fSwibm9ybWFsaXplZCI6WyJiaWxsaW5nX2hlYWRl"
    b"ciIsIngiXSwib3RoZXJfdHVybl9rZXlzIjp7InQyIjoic3RvcF9zdHJpbmdfcHV0X2JhY2sifSwiYXJyYXlzIjpbWyJwcm9tcHRfdG9rZW5f"
    b"aWRzIiwiPGk0IixbMl1dLFsiZ2VuZXJhdGlvbl90b2tlbl9pZHMiLCI8aTQiLFszXV0sWyJnZW5lcmF0aW9uX2xvZ19wcm9icyIsIjxmNCIs"
    b"WzNdXSxbInJvdXRlZF9leHBlcnRzIiwiPGkyIixbOSwyLDFdXSxbInNhbXBsaW5nX21hc2siLCJ8YjEiLFszLDJdXV19ICBbeyJ0eXBlIjoi"
    b"bWVzc2FnZSIsInRleHQiOiJjYWbDqSDtoL0ifV0gBgAAAAcAAAAIAAAACQAAAAoAAAAAAAAAAAAAvgAAAMAAAAAAAAAAAAAAAQACAAMABAAF"
    b"AAYABwAIAAkACgALAAwADQAOAA8AEAARAAAAAAABAAEAAQAAAA=="
)
OTHER = (
    b"R0NFTgEAAAAgAQAACAAAAAAAAAAAAAAAHfy37JRZgMqqulSpAh6bRHsicm9sbG91dF9pZCI6InIxIiwibW9kZWxfY2FsbF9pZCI6ImMiLCJt"
    b"b2RlbCI6InBvbGljeSIsInJlcXVlc3RlZF9tb2RlbCI6InBvbGljeSIsImhhc190b29scyI6ZmFsc2UsInR1cm5fa2V5IjoiIiwiZmluaXNo"
    b"X3JlYXNvbiI6IiIsInBhcmVudCI6WyJ1bnJlc29sdmVkIiwibm9fbWF0Y2giXSwiYXJyYXlzIjpbWyJwcm9tcHRfdG9rZW5faWRzIiwiPGk0"
    b"IixbMV1dLFsiZ2VuZXJhdGlvbl90b2tlbl9pZHMiLCI8aTQiLFswXV0sWyJnZW5lcmF0aW9uX2xvZ19wcm9icyIsIjxmNCIsWzBdXV19ICAg"
    b"ICAgIFtdICAgICAgAQAAAAAAAAA="
)
SNAPSHOT = (
    b"R0NFUwEAAADgAAAAAAAAAHsicm9sbG91dF9pZCI6InIxIiwic25hcHNob3RfaWQiOiJzIiwidmVyc2lvbiI6NCwiaW5jb21wbGV0ZSI6WyJk"
    b"YW5nbGluZ19pbnRlbnQ6eCJdLCJwcm9ibGVtcyI6W1siY29uZmxpY3RpbmdfY2FsbF9pZCIsImEiLG51bGwsInR3aWNlIl1dLCJkZWxpdmVy"
    b"eSI6eyJhIjp0cnVlfSwibG9zdF9jYWxscyI6W1sieCIsWyJhIl0sWyJ0Il1dXSwiZW50cnlfc2l6ZXMiOls5MjgsMjg4LDM0NF19ICAgR0NF"
    b"TgEAAAD4AgAAKAAAAAAAEED8VNlB9rmxZwiH4SF2HLp8T0h8R3sicm9sbG91dF9pZCI6InIxIiwibW9kZWxfY2FsbF9pZCI6ImLtoL0iLCJt"
    b"b2RlbCI6InBvbGljeSIsInJlcXVlc3RlZF9tb2RlbCI6InNtYWxsIiwiaGFzX3Rvb2xzIjp0cnVlLCJwcm9tcHRfb2Zmc2V0Ijo1LCJ0b2tl"
    b"bl9pdGVtX2luZGV4IjowLCJ0dXJuX2tleSI6InQiLCJhc2tlZF9rZXkiOiJxIiwiZGlnZXN0IjoiYjJmZTdhMmFiZjU0OWQ5NjM0MmVlY2Ez"
    b"YjkzODIxMTU4NDE2MzBlMDUzNzc2ODU2MzU2YjkzMjZmMWZiODk3NCIsImZpbmlzaF9yZWFzb24iOiJzdG9wIiwic3RvcF9yZWFzb24iOiI3"
    b"IiwiZGVsaXZlcmVkIjpmYWxzZSwicHJlZml4X3JlcXVlc3RlZCI6dHJ1ZSwicHJlZml4X3N1cHBsaWVkIjp0cnVlLCJtYXhfdG9rZW5zIjow"
    b"LCJwYXJlbnQiOlsiY29udGludWVzIiwiYSIsNV0sIndlaWdodF92ZXJzaW9ucyI6W1swLDEsIjEiXSxbMSwzLCIyIl1dLCJzYW1wbGluZyI6"
    b"eyJ0ZW1wZXJhdHVyZSI6MS4wLCJzZWVkIjoxMTgwNTkxNjIwNzE3NDExMzAzNDI0fSwibm9ybWFsaXplZCI6WyJiaWxsaW5nX2hlYWRlciIs"
    b"IngiXSwib3RoZXJfdHVybl9rZXlzIjp7InQyIjoic3RvcF9zdHJpbmdfcHV0X2JhY2sifSwiYXJyYXlzIjpbWyJwcm9tcHRfdG9rZW5faWRz"
    b"IiwiPGk0IixbMl1dLFsiZ2VuZXJhdGlvbl90b2tlbl9pZHMiLCI8aTQiLFszXV0sWyJnZW5lcmF0aW9uX2xvZ19wcm9icyIsIjxmNCIsWzNd"
    b"XSxbInJvdXRlZF9leHBlcnRzIiwiPGkyIixbOSwyLDFdXSxbInNhbXBsaW5nX21hc2siLCJ8YjEiLFszLDJdXV19ICBbeyJ0eXBlIjoibWVz"
    b"c2FnZSIsInRleHQiOiJjYWbDqSDtoL0ifV0gBgAAAAcAAAAIAAAACQAAAAoAAAAAAAAAAAAAvgAAAMAAAAAAAAAAAAAAAQACAAMABAAFAAYA"
    b"BwAIAAkACgALAAwADQAOAA8AEAARAAAAAAABAAEAAQAAAEdDRU4BAAAA0AAAAAgAAAAAAAAAAAAAAKEK1k4Ef9OXzTX/LQC/Mb97InJvbGxv"
    b"dXRfaWQiOiJyMSIsIm1vZGVsX2NhbGxfaWQiOiJhIiwibW9kZWwiOiIiLCJyZXF1ZXN0ZWRfbW9kZWwiOiIiLCJoYXNfdG9vbHMiOmZhbHNl"
    b"LCJhcnJheXMiOltbInByb21wdF90b2tlbl9pZHMiLCI8aTQiLFszXV0sWyJnZW5lcmF0aW9uX3Rva2VuX2lkcyIsIjxpNCIsWzJdXSxbImdl"
    b"bmVyYXRpb25fbG9nX3Byb2JzIiwiPGY0IixbMl1dXX0gICAgICAgW10gICAgICABAAAAAgAAAAMAAAAAAAAABAAAAAUAAAAAAAC/AACAvkdD"
    b"RU4BAAAAIAEAAAgAAAAAAAAAAAAAAB38t+yUWYDKqrpUqQIem0R7InJvbGxvdXRfaWQiOiJyMSIsIm1vZGVsX2NhbGxfaWQiOiJjIiwibW9k"
    b"ZWwiOiJwb2xpY3kiLCJyZXF1ZXN0ZWRfbW9kZWwiOiJwb2xpY3kiLCJoYXNfdG9vbHMiOmZhbHNlLCJ0dXJuX2tleSI6IiIsImZpbmlzaF9y"
    b"ZWFzb24iOiIiLCJwYXJlbnQiOlsidW5yZXNvbHZlZCIsIm5vX21hdGNoIl0sImFycmF5cyI6W1sicHJvbXB0X3Rva2VuX2lkcyIsIjxpNCIs"
    b"WzFdXSxbImdlbmVyYXRpb25fdG9rZW5faWRzIiwiPGk0IixbMF1dLFsiZ2VuZXJhdGlvbl9sb2dfcHJvYnMiLCI8ZjQiLFswXV1dfSAgICAg"
    b"ICBbXSAgICAgIAEAAAAAAAAA"
)
INTENT = (
    b"eyJ2IjoxLCJyb2xsb3V0X2lkIjoicjEiLCJtb2RlbF9jYWxsX2lkIjoieCIsImNyZWF0ZWRfYXQiOjEuNSwicmVxdWVzdF9kaWdlc3QiOiJk"
    b"IiwicmVxdWVzdF9rZXkiOiJrIiwiYW5zd2VyX2tleSI6IncifQ=="
)


IDS = as_ids([1, 2, 3, 4, 5, 6, 7])
ROOT_ENTRY = entry_of(
    rollout_id="r1",
    model_call_id="a",
    model="",
    requested_model="",
    has_tools=False,
    prompt_token_ids=as_ids([1, 2, 3]),
    generation_token_ids=as_ids([4, 5]),
    generation_log_probs=np.array([-0.5, -0.25], np.float32),
    parent=None,
)
FULL_ENTRY = entry_of(
    rollout_id="r1",
    model_call_id="b\ud83d",
    model="policy",
    requested_model="small",
    has_tools=True,
    prompt_token_ids=IDS,
    generation_token_ids=as_ids([8, 9, 10]),
    generation_log_probs=np.array([-0.125, -2.0, 0.0], np.float32),
    parent=Continues("a", 5),
    output_items=({"type": "message", "text": "caf\u00e9 \ud83d"},),
    token_item_index=0,
    turn_key="t",
    asked_key="q",
    other_turn_keys={"t2": "stop_string_put_back"},
    digest=digest_ids(IDS, as_ids([8, 9, 10])),
    finish_reason="stop",
    stop_reason="7",
    delivered=False,
    prefix_requested=True,
    prefix_supplied=True,
    weight_versions=(WeightSpan(0, 1, "1"), WeightSpan(1, 3, "2")),
    sampling={"temperature": 1.0, "seed": 2**70},
    max_tokens=0,
    normalized=("billing_header", "x"),
    routed_experts=np.arange(18, dtype=np.int16).reshape(9, 2, 1),
    sampling_mask=np.array([[True, False]] * 3),
    created_at=1_700_000_000.25,
)
OTHER_ENTRY = entry_of(
    rollout_id="r1",
    model_call_id="c",
    model="policy",
    requested_model="policy",
    has_tools=False,
    prompt_token_ids=as_ids([1]),
    generation_token_ids=as_ids([]),
    generation_log_probs=np.zeros(0, np.float32),
    parent=Unresolved("no_match"),
    finish_reason="",
    turn_key="",
)
THE_INTENT = CallIntent(
    rollout_id="r1", model_call_id="x", created_at=1.5, request_digest="d", request_key="k", answer_key="w"
)


def test_the_same_records_give_the_same_bytes() -> None:
    assert encode_entry(ROOT_ENTRY) == base64.b64decode(ROOT)
    assert encode_entry(FULL_ENTRY) == base64.b64decode(WHOLE)
    assert encode_suffix(FULL_ENTRY) == base64.b64decode(SUFFIX)
    assert encode_entry(OTHER_ENTRY) == base64.b64decode(OTHER)
    assert encode_intent(THE_INTENT) == base64.b64decode(INTENT)


def test_old_bytes_are_read_as_what_they_said() -> None:
    for data, entry in ((ROOT, ROOT_ENTRY), (WHOLE, FULL_ENTRY), (OTHER, OTHER_ENTRY)):
        # Each record has bytes of its own (the test above), so that equal bytes are equal records.
        assert encode_entry(decode_entry(base64.b64decode(data))) == encode_entry(entry)
    assert decode_intent(base64.b64decode(INTENT)) == THE_INTENT


def test_an_old_snapshot_opens() -> None:
    read = decode_snapshot(base64.b64decode(SNAPSHOT))
    assert (read.rollout_id, read.snapshot_id, read.version) == ("r1", "s", 4)
    assert read.incomplete == ("dangling_intent:x",)
    assert read.problems == (RecordProblem(reason="conflicting_call_id", call_id="a", field=None, detail="twice"),)
    assert read.lost_calls == (LostCall(model_call_id="x", retries=("a",), answers=("t",)),)
    assert {entry.model_call_id: entry.delivered for entry in read.entries} == {"b\ud83d": False, "a": True, "c": None}
    (b,) = (entry for entry in read.entries if entry.model_call_id == "b\ud83d")
    assert encode_suffix(b) == base64.b64decode(SUFFIX)
