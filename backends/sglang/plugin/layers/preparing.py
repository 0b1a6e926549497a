"""What a rank does for a change before its commit: memory, transfers, the copy, and how far they are."""

from typing import TYPE_CHECKING, Any

from meshift.backends.sglang import wire_layers as wire
from meshift.backends.sglang.pairs import from_wire, to_wire
from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.backends.sglang.plugin.layers.change import Change
from meshift.backends.sglang.plugin.layers.copying import LayerCopy, PairCopy
from meshift.backends.sglang.plugin.layers.receiving import LayerReceiver
from meshift.backends.sglang.plugin.layers.rows import LayerRows, Slots
from meshift.backends.sglang.plugin.layers.scheduled import Scheduled
from meshift.kv_memory.arena import ArenaExhausted
from meshift.schemas.layouts import LayoutRefusal

if TYPE_CHECKING:
    from meshift.backends.sglang.plugin.agent import RankAgent


class Preparation:
    """Of all changes of one rank. On its step thread."""

    def __init__(self, scheduler: Any, agent: "RankAgent", kv: RankKv, data: DataPlane, scheduled: Scheduled) -> None:
        self._scheduler = scheduler
        self._agent = agent
        self._kv = kv
        self._data = data
        self._scheduled = scheduled

    def open(self, change: Change, command: wire.OpenLayers) -> None:
        """Take memory for what this rank gets, and receive."""
        pairs = change.command.pairs
        mine = [(index, pair) for index, pair in enumerate(pairs) if pair.destination == self._agent.rank]
        layers = [layer for _, pair in mine for layer in range(pair.start, pair.end)]
        pool = self._pool
        if not change.receivers and layers:
            try:
                pool.stage_layers(layers, self._scheduler.kv_capacity.given_up)
            except ArenaExhausted as error:
                self._agent.answer(
                    wire.LayersRefused,
                    command.nonce,
                    refusal=LayoutRefusal.NO_MEMORY.value,
                    message=str(error),
                )
                return
        opened = []
        for index, pair in mine:
            rows = LayerRows(pool.layer_buffers(range(pair.start, pair.end)))
            receiver = LayerReceiver(pair, rows, change.arrived)
            address = self._data.open_transfer(pair.transfer_id, receiver.apply)
            change.receivers.append(receiver)
            opened.append((index, to_wire(address)))
        self._agent.answer(wire.LayersOpened, command.nonce, addresses=opened)

    def send(self, change: Change, command: wire.SendLayers) -> None:
        """Begin to copy what this rank gives."""
        outgoing = [
            (pair, from_wire(address))
            for pair, address in zip(change.command.pairs, command.addresses, strict=True)
            if pair.source == self._agent.rank
        ]
        if outgoing and change.copy is None:
            pool, share, live = self._pool, self._kv.share, self._live_slots()
            pairs = [
                PairCopy(pair, address, LayerRows(pool.layer_buffers(range(pair.start, pair.end))), pool.dirty, live)
                for pair, address in outgoing
            ]
            heads = share.head_start, share.head_end
            change.copy = LayerCopy(pairs, self._data, heads, lambda: self._scheduled.tokens, command.bytes_per_s)
            change.copy.start()
        self._agent.answer(wire.LayersDone, command.nonce)

    def tell(self, change: Change, command: wire.AskLayers) -> None:
        """How far it is."""
        receivers = change.receivers
        self._agent.answer(
            wire.LayersAt,
            command.nonce,
            scheduled_tokens=self._scheduled.tokens,
            layers=len(change.loading.layers),
            layers_loaded=change.loading.loaded,
            applied_tokens=min((one.applied for one in receivers), default=-1),
            byte_count=sum(one.byte_count for one in receivers),
            rounds=min((one.rounds for one in receivers), default=0),
            problem=change.trouble(),
        )

    def hashes(self, change: Change) -> list[tuple[int, str]]:
        """Of what is in the live slots, at this rank's end of each pair."""
        live = self._live_slots()
        return [
            (index, LayerRows(self._pool.layer_buffers(range(pair.start, pair.end))).hash(live))
            for index, pair in enumerate(change.command.pairs)
            if self._agent.rank in (pair.source, pair.destination)
        ]

    def _live_slots(self) -> Slots:
        free = self._scheduler.token_to_kv_pool_allocator.get_all_free_pages().cpu().numpy()
        live: Slots = self._pool.live_slots(free, self._scheduler.kv_capacity.given_up)
        return live

    @property
    def _pool(self) -> Any:
        return self._scheduler.token_to_kv_pool_allocator.get_kvcache()
