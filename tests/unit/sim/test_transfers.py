"""Rounds of a move on the data plane: order, refusals, faults."""

import asyncio
from dataclasses import replace

import pytest

from meshift.backends.base import DeltaSent, MoveKey, MoveRefused, Refusal
from meshift.kv_memory.transport import FaultRates, TransportError
from meshift.services.simulation import virtual_time
from tests.unit.sim.kit import PLAIN, Duo, Wire, make_request, undisturbed


@pytest.mark.parametrize(
    ("area", "size", "watermark", "generation"),
    [((30, 33), 12, 9, 9), ((0, 3), 8, 9, 9), ((0, 3), 12, 4, 5), ((0, 3), 12, 9, 4)],
    ids=["outside", "size", "watermark", "generation"],
)
def test_patches_that_are_not_applied(area: tuple[int, int], size: int, watermark: int, generation: int) -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = MoveKey("r", 1, 1)
        reserved = await duo.reserve(key, [1], 20, 10.0)
        wire = Wire(duo, key, reserved.targets[0])
        await wire.send((0, 5), bytes(20), watermark=5, generation=5)
        await wire.send((0, 5), bytes(20), watermark=5, generation=5)
        with pytest.raises(TransportError):
            await wire.send(area, bytes(size), watermark, generation)
        await duo.destination.abort(key)
        await duo.whole()

    virtual_time.run(main())


@pytest.mark.parametrize("fault", ["lost", "corrupted", "acknowledgement_lost", "partition", "killed"])
def test_a_broken_transfer_refuses_the_round(fault: str) -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(20, 40)
        whole = await undisturbed(request)
        key = await duo.running(request)
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 96, 2.0)
        if fault == "partition":
            duo.fabric.partition("source", "destination")
        elif fault == "killed":
            duo.fabric.kill("destination")
        else:
            duo.fabric.faults = FaultRates(**{fault: 1.0})
        with pytest.raises(MoveRefused) as caught:
            await duo.source.send_delta(key, 0, reserved)
        assert caught.value.refusal is Refusal.BROKEN
        await duo.source.resume(key, 2)
        # Nobody aborts: the destination's deadline does.
        await asyncio.sleep(3.0)
        await duo.whole()
        resumed = request.key._replace(attempt=2)
        assert duo.before.tokens[request.key] + duo.before.tokens.get(resumed, []) == whole

    virtual_time.run(main())


def test_a_round_needs_one_target_and_a_start_that_exists() -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = await duo.running(make_request(20, 40))
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 96, 10.0)
        for start, targets in ((0, ()), (0, reserved.targets * 2), (-1, reserved.targets), (500, reserved.targets)):
            with pytest.raises(MoveRefused):
                await duo.source.send_delta(key, start, replace(reserved, targets=targets))
        with pytest.raises(MoveRefused) as caught:
            await duo.source.send_delta(key, 0, replace(reserved, layout=replace(reserved.layout, weights="others")))
        assert caught.value.refusal is Refusal.INCOMPATIBLE
        sent = await duo.source.send_delta(key, 0, reserved)
        assert isinstance(sent, DeltaSent)
        assert sent.byte_count == sent.end * PLAIN.kv_token_bytes
        assert begun.growth_max == 39
        await duo.destination.abort(key)
        await duo.source.resume(key, 1)
        await duo.whole()

    virtual_time.run(main())
