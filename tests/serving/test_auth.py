"""Who may call, over HTTP, with the API key that a client library sends."""

from __future__ import annotations

import logging

import pytest
from openai import AsyncOpenAI, PermissionDeniedError

from gym_capture.auth import Keyring
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import saying
from tests.serving.replica import Replica, chat_body, chat_path

KEYS = Keyring(b"0123456789abcdef0123456789abcdef")


def replica_of(template: HfChatTemplate, keyring: Keyring | None = KEYS) -> Replica:
    return Replica(template, lambda _: saying(template, "one", stop_token="<|im_end|>"), keyring=keyring)


async def ask(replica: Replica, api_key: str, *, rollout_id: str | None = "r1") -> str | None:
    base_url = "http://gateway" + chat_path(rollout_id).removesuffix("/chat/completions")
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=replica.http)
    reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    return reply.choices[0].message.content


async def test_a_rollouts_token_is_an_api_key(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    assert await ask(replica, KEYS.rollout_token("r1")) == "one"
    assert await ask(replica, KEYS.untracked_token(), rollout_id=None) == "one"
    assert len(await replica.state.entries()) == 1


@pytest.mark.parametrize("api_key", [KEYS.rollout_token("r2"), KEYS.read_token(), KEYS.untracked_token(), "sk-made-up"])
async def test_another_token_is_refused_before_anything_happens(template: HfChatTemplate, api_key: str) -> None:
    replica = replica_of(template)
    with pytest.raises(PermissionDeniedError) as error:
        await ask(replica, api_key)
    assert error.value.type == "permission_error"
    assert replica.engine.calls == []
    assert await replica.state.store.rollout_ids() == []


async def test_reading_records_takes_the_read_token(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    await ask(replica, KEYS.rollout_token("r1"))
    path = "/ng-rollout/r1/token-records"
    for token, status in ((KEYS.read_token(), 200), (KEYS.rollout_token("r1"), 403), ("", 401)):
        headers = {"authorization": f"Bearer {token}"} if token else {}
        assert (await replica.http.get(path, headers=headers)).status_code == status


async def test_no_token_is_401(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    response = await replica.http.post(chat_path("r1"), json=chat_body())
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


async def test_a_rollout_id_that_cannot_be_has_no_token(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    headers = {"x-api-key": KEYS.rollout_token("r1")}
    response = await replica.http.post(chat_path("r1%2F..%2Fr2"), json=chat_body(), headers=headers)
    assert 400 <= response.status_code < 500


async def test_without_a_secret_everything_is_open_and_the_log_says_so_once(
    template: HfChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        replica = replica_of(template, keyring=None)
        for rollout_id in ("r1", "r2", None):
            assert await ask(replica, "anything", rollout_id=rollout_id) == "one"

    with caplog.at_level(logging.WARNING, logger="gym_capture"):
        await run()
    assert [record.getMessage() for record in caplog.records if "secret_file" in record.getMessage()] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_beyond_the_limit_is_refused(template: HfChatTemplate, announced: bool) -> None:
    replica = Replica(template, lambda _: saying(template, "one", stop_token="<|im_end|>"), max_body_bytes=1000)
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "' + b"x" * 1000 + b'"}]}'

    async def parts():  # type: ignore[no-untyped-def]
        yield body[:500]
        yield body[500:]

    response = await replica.http.post(chat_path("r1"), content=body if announced else parts())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert (await replica.http.post(chat_path("r1"), json=chat_body())).status_code == 200
