"""NeMo Gym's own code verifies the receipts and rebuilds their rows. `make test-trainers`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nemo_gym.token_id_capture import staging

from gym_capture.errors import RecordError
from tests.trainers.group import GROUP, MAIN
from trainer_bridge.nemo_receipts import stage
from trainer_bridge.samples import Delivery

SPLIT, SHORT, MASKED, PLAIN = GROUP


def test_the_digests_here_are_the_published_ones() -> None:
    staging.assert_golden_vectors()


def test_a_receipt_is_linearized_to_the_main_chain() -> None:
    delivery = Delivery()
    receipt, snapshots = stage(SPLIT, delivery, staging)
    row = staging.verify_and_linearize(receipt, snapshots)
    assert row.token_ids == MAIN.token_ids.tolist()
    assert row.token_mask == MAIN.loss_mask.astype(float).tolist()
    assert row.logprobs == MAIN.log_probs.tolist()
    assert (row.prompt_len, row.call_ids, row.weight_versions) == (2, ["a", "b"], [3, 3])
    assert receipt.reward == 1.0
    assert (delivery.other_chains, delivery.tokens_of_other_chains) == (1, 1)


def test_what_was_changed_under_a_receipt_is_refused() -> None:
    receipt, snapshots = stage(SPLIT, Delivery(), staging)
    changed = snapshots[0].model_copy(update={"token_ids_delta": [1, 2, 3, 5]})
    with pytest.raises(staging.ReceiptVerificationError, match="corrupt_digest"):
        staging.verify_and_linearize(receipt, [changed, *snapshots[1:]])


def test_a_masked_rollout_is_poisoned_and_keeps_its_reward() -> None:
    receipt, snapshots = stage(replace(MASKED, mask_reasons=("dangling_intent:x",)), Delivery(), staging)
    assert (receipt.capture_poisoned, receipt.failure_reason, receipt.reward) == (True, "dangling_intent:x", 100.0)
    with pytest.raises(staging.ReceiptVerificationError, match="rollout_failed"):
        staging.verify_and_linearize(receipt, snapshots)


def test_a_call_with_an_unknown_log_probability_is_poisoned() -> None:
    delivery = Delivery()
    receipt, _ = stage(SHORT, delivery, staging)
    assert receipt.capture_poisoned
    assert delivery.left_out == {"no_trained_tokens": 1}


def test_a_version_that_is_no_number_is_named() -> None:
    named = replace(MAIN, spans=tuple(replace(span, weight_version="step-3") for span in MAIN.spans))
    with pytest.raises(RecordError, match="got 'step-3'"):
        stage(replace(PLAIN, sequences=(named,)), Delivery(), staging)


def test_a_chain_that_goes_on_after_its_last_trained_id_ends_there() -> None:
    longer = replace(
        MAIN,
        token_ids=np.append(MAIN.token_ids, np.int32(99)),
        loss_mask=np.append(MAIN.loss_mask, False),
        log_probs=np.append(MAIN.log_probs, np.float32(0)),
    )
    receipt, snapshots = stage(replace(PLAIN, sequences=(longer,)), Delivery(), staging)
    assert staging.verify_and_linearize(receipt, snapshots).token_ids == MAIN.token_ids.tolist()
