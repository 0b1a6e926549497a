"""Sends that have a deadline, on a virtual clock."""

import asyncio

import pytest
from starlette.types import Message

from meshift.services.frontend.http.disconnect import BoundedSend, ClientGone
from meshift.services.simulation.virtual_time import run

TIMEOUT_S = 10.0
CHUNK: Message = {"type": "http.response.body"}


class Connection:
    """Takes each message after `takes_s`."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.taken = 0

    async def send(self, message: Message) -> None:
        await asyncio.sleep(self.takes_s)
        self.taken += 1


def test_each_send_has_the_whole_time_and_pauses_between_them_count_for_nothing() -> None:
    async def main() -> None:
        connection = Connection(takes_s=0.9 * TIMEOUT_S)
        send = BoundedSend(connection.send, TIMEOUT_S)
        for pause_s in (0.0, 0.5 * TIMEOUT_S, 3.0 * TIMEOUT_S, 0.0):
            await asyncio.sleep(pause_s)
            await send(CHUNK)
        assert connection.taken == 4
        send.close()

    run(main())


@pytest.mark.parametrize("sends_before", [0, 1, 5])
def test_a_client_that_takes_nothing_is_gone_in_time(sends_before: int) -> None:
    async def main() -> None:
        loop, connection = asyncio.get_running_loop(), Connection(takes_s=0.7 * TIMEOUT_S)
        send = BoundedSend(connection.send, TIMEOUT_S)
        for _ in range(sends_before):
            await send(CHUNK)
        connection.takes_s, begin_s = 100.0 * TIMEOUT_S, loop.time()
        with pytest.raises(ClientGone):
            await send(CHUNK)
        assert loop.time() - begin_s == pytest.approx(TIMEOUT_S)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        send.close()

    run(main())


@pytest.mark.parametrize("after_s", [0.5 * TIMEOUT_S, TIMEOUT_S])
def test_a_cancellation_stays_one(after_s: float) -> None:
    """Also when it comes at the very deadline."""

    async def main() -> None:
        send = BoundedSend(Connection(takes_s=100.0 * TIMEOUT_S).send, TIMEOUT_S)
        task = asyncio.ensure_future(send(CHUNK))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        send.close()

    run(main())


def test_a_connection_that_breaks_is_gone() -> None:
    async def broken(_: Message) -> None:
        raise ConnectionResetError

    async def main() -> None:
        send = BoundedSend(broken, TIMEOUT_S)
        with pytest.raises(ClientGone):
            await send(CHUNK)
        send.close()

    run(main())
