"""Exchanges are read by one thread while another writes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gym_capture.rollouts.exchanges import EXCHANGES_FILE, Exchanges
from gym_capture.rollouts.rows import Exchange

WORDS = "a long text, so that a line is not read at one go " * 200


def test_one_thread_may_read_what_another_goes_on_writing(tmp_path: Path) -> None:
    with Exchanges(tmp_path) as exchanges, ThreadPoolExecutor(1) as reader:
        exchanges.add("r0", Exchange(input=[{"text": WORDS}], tools=[]))

        def read() -> int:
            return sum(exchanges.get("r0").input == [{"text": WORDS}] for _ in range(300))

        reading = reader.submit(read)
        written = 0
        while not reading.done():
            written += 1
            exchanges.add(f"r{written}", Exchange(input=[{"text": str(written)}], tools=[]))
        assert reading.result() == 300
        assert exchanges.get(f"r{written}").input == [{"text": str(written)}]
    assert (tmp_path / EXCHANGES_FILE).read_bytes().count(b"\n") == written + 1
