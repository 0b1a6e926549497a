"""What every bus does: requests."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from meshift.schemas.base import Message
from meshift.schemas.errors import (
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    PeerGone,
    PeerTimeout,
)
from meshift.schemas.instances import DispatchReply, DispatchRequest, DrainRequest, InstanceGone, StatusRequest
from meshift.schemas.requests import SubmitReply
from tests.contract.bus_kit import (
    ASK,
    DEADLINE_S,
    LEAF_ERRORS,
    OWNER,
    REPLY,
    Buses,
    LoopSuite,
    Mailbox,
    Trace,
    dispatch_request,
    known,
    numbered,
    until,
)


class RequestSuite(LoopSuite):
    """Requests and answers, and the trace context on both."""

    async def test_request_and_answer(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()

        def handler(message: DispatchRequest) -> DispatchReply:
            mailbox(message)
            return DispatchReply(owner=OWNER, scheduler_id=message.request_id, incarnation=1)

        service.serve("dispatch", "x", DispatchRequest, handler)
        await known(service)
        sent = dispatch_request("r1")
        answer = await client.request("x", sent, DispatchReply, timeout_s=DEADLINE_S)
        assert answer == DispatchReply(owner=OWNER, scheduler_id="r1", incarnation=1)
        assert mailbox.messages == [sent]

    async def test_a_client_may_ask_itself(self, buses: Buses) -> None:
        bus = await buses.started("a")
        bus.serve("ask", "x", StatusRequest, lambda _: REPLY)
        await known(bus)
        assert await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY

    async def test_requests_run_concurrently_and_answers_find_their_own(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        waiting: list[tuple[int, asyncio.Future[None]]] = []

        async def handler(message: DispatchRequest) -> DispatchReply:
            gate = asyncio.get_running_loop().create_future()
            waiting.append((message.demand, gate))
            await gate
            return DispatchReply(owner=OWNER, scheduler_id=str(message.demand), incarnation=1)

        service.serve("dispatch", "x", DispatchRequest, handler)
        await known(service)
        asked = [
            asyncio.ensure_future(client.request("x", dispatch_request(demand=n), DispatchReply, timeout_s=DEADLINE_S))
            for n in range(1, 51)
        ]
        await until(lambda: len(waiting) == 50)
        for _, gate in sorted(waiting, reverse=True):
            gate.set_result(None)
        answers = await asyncio.gather(*asked)
        assert [int(answer.scheduler_id) for answer in answers] == list(range(1, 51))

    async def test_endpoints_of_two_services_share_the_requests(self, buses: Buses) -> None:
        client = await buses.started("a")
        services = [await buses.started(name) for name in ("b", "c")]
        served = [0, 0]

        def handler_of(index: int) -> Callable[[StatusRequest], SubmitReply]:
            def handler(_: StatusRequest) -> SubmitReply:
                served[index] += 1
                return REPLY

            return handler

        for index, service in enumerate(services):
            service.serve("ask", "x", StatusRequest, handler_of(index))
        await known(*services)
        for _ in range(60):
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert sum(served) == 60
        assert min(served) > 0, "2**-59 is the chance that a fair choice leaves one out"
        await services[0].close()
        for _ in range(10):
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert sum(served) == 70

    async def test_a_plain_subscription_sees_requests(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()
        service.serve("ask", "x", StatusRequest, lambda _: REPLY)
        client.subscribe("x", StatusRequest, mailbox)
        await known(client, service)
        await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        await mailbox.take(1)

    async def test_nobody_serves_it(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerGone, match=r"x\.y"):
            await client.request("x.y", ASK, SubmitReply, timeout_s=10 * DEADLINE_S)
        endpoint = service.serve("ask", "x.y", StatusRequest, lambda _: REPLY)
        await known(service)
        await client.request("x.y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        endpoint.close()
        endpoint.close()
        await known(service)
        with pytest.raises(PeerGone):
            await client.request("x.y", ASK, SubmitReply, timeout_s=10 * DEADLINE_S)
        service.serve("ask", "x.y", StatusRequest, lambda _: REPLY)
        await known(service)
        await client.request("x.y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert asyncio.get_running_loop().time() - began < DEADLINE_S, "at once, not at the deadline"

    async def test_no_answer_by_the_deadline(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        gate = asyncio.Event()

        async def handler(message: DispatchRequest) -> SubmitReply:
            if message.request_id == "slow":
                await gate.wait()
            return REPLY

        service.serve("ask", "x", DispatchRequest, handler)
        await known(service)
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerTimeout, match=r"x within 0\.05 s"):
            await client.request("x", dispatch_request("slow"), SubmitReply, timeout_s=0.05)
        assert 0.05 <= asyncio.get_running_loop().time() - began + 1e-6 < DEADLINE_S
        gate.set()
        # The late answer to the first is nobody's.
        assert await client.request("x", dispatch_request("fast"), SubmitReply, timeout_s=DEADLINE_S) == REPLY

    async def test_a_caller_may_give_up(self, buses: Buses) -> None:
        client = await buses.started("a", requests_in_flight_max=1)
        service = await buses.started("b", close_timeout_s=0.01)
        asked = asyncio.Event()

        async def never(_: StatusRequest) -> SubmitReply:
            asked.set()
            await asyncio.Event().wait()
            return REPLY

        service.serve("never", "x", StatusRequest, never)
        service.serve("ask", "y", StatusRequest, lambda _: REPLY)
        await known(service)
        task = asyncio.ensure_future(client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        with pytest.raises(Overloaded):
            await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY

    @pytest.mark.parametrize("error_type", LEAF_ERRORS)
    async def test_an_endpoint_error_arrives_as_itself(self, buses: Buses, error_type: type[MeshError]) -> None:
        client, service = await buses.started("a"), await buses.started("b")

        def refuse(_: StatusRequest) -> SubmitReply:
            raise error_type("because\nof Ü", param="field.1")

        async def refuse_later(_: StatusRequest) -> SubmitReply:
            return refuse(_)

        service.serve("refuse", "x", StatusRequest, refuse)
        service.serve("later", "y", StatusRequest, refuse_later)
        await known(service)
        for subject in ("x", "y"):
            with pytest.raises(MeshError) as caught:
                await client.request(subject, ASK, SubmitReply, timeout_s=DEADLINE_S)
            assert caught.type.code is error_type.code
            assert issubclass(caught.type, error_type)
            assert caught.value.message == "because\nof Ü"
            assert caught.value.param == "field.1"
        assert service.counters.handler_errors == 0

    async def test_a_bug_in_an_endpoint_is_an_internal_error(
        self, buses: Buses, caplog: pytest.LogCaptureFixture
    ) -> None:
        client, service = await buses.started("a"), await buses.started("b")

        async def later(_: StatusRequest) -> SubmitReply:
            raise KeyError("secret")

        def now(_: StatusRequest) -> SubmitReply:
            raise KeyError("secret")

        def nothing(_: StatusRequest) -> Any:
            return None

        service.serve("now", "x", StatusRequest, now)
        service.serve("later", "y", StatusRequest, later)
        service.serve("nothing", "z", StatusRequest, nothing)
        await known(service)
        for count, subject in enumerate("xyz", 1):
            with pytest.raises(InternalError) as caught:
                await client.request(subject, ASK, SubmitReply, timeout_s=DEADLINE_S)
            assert "secret" not in caught.value.message, "what a bug says may be private"
            assert service.counters.handler_errors == count
        assert "secret" in caplog.text

    async def test_a_wrong_answer_is_an_internal_error(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        service.serve("ask", "x", StatusRequest, lambda _: DrainRequest())
        await known(service)
        with pytest.raises(InternalError, match="SubmitReply"):
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)

    async def test_a_wrong_request_names_the_field(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        service.serve("dispatch", "x", DispatchRequest, lambda _: REPLY)
        await known(service)
        with pytest.raises(InvalidRequest) as caught:
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert caught.value.param == "kind"
        assert service.counters.invalid == 1
        if self.encodes:
            unchecked = dispatch_request().model_copy(update={"demand": 0})
            with pytest.raises(InvalidRequest, match="demand") as caught:
                await client.request("x", unchecked, SubmitReply, timeout_s=DEADLINE_S)
            assert caught.value.param == "demand"
            assert service.counters.invalid == 2

    async def test_a_request_under_way_to_an_endpoint_that_closes_is_refused(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")

        def handler(_: StatusRequest) -> SubmitReply:
            endpoint.close()
            return REPLY

        endpoint = service.serve("once", "x", StatusRequest, handler)
        await known(service)
        asked = [client.request("x", ASK, SubmitReply, timeout_s=10 * DEADLINE_S) for _ in range(3)]
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert ends[0] == REPLY
        assert [type(end) for end in ends[1:]] == [PeerGone, PeerGone]

    async def test_the_sender_s_context_is_the_handler_s(self, buses: Buses) -> None:
        trace = Trace()
        client, service = await buses.started("a", propagator=trace), await buses.started("b", propagator=trace)
        seen: list[str] = []

        def note(_: Message) -> SubmitReply:
            seen.append(trace.current.get())
            return REPLY

        async def note_later(_: Message) -> SubmitReply:
            await asyncio.sleep(0)
            return note(_)

        service.subscribe("x", InstanceGone, lambda message: seen.append(note(message).kind and trace.current.get()))
        service.serve("now", "y", StatusRequest, note)
        service.serve("later", "z", StatusRequest, note_later)
        await known(service)
        trace.current.set("00-aa-bb-01")
        client.publish("x", numbered(0))
        await until(lambda: len(seen) == 2)
        await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        await client.request("z", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert seen == ["00-aa-bb-01"] * 4
        trace.current.set("")
        await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert seen[-1] == ""

    async def test_a_client_without_tracing_ignores_headers(self, buses: Buses) -> None:
        trace = Trace()
        client, service = await buses.started("a", propagator=trace), await buses.started("b")
        service.serve("ask", "x", StatusRequest, lambda _: REPLY)
        await known(service)
        trace.current.set("00-aa-bb-01")
        assert await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY
