"""The data plane over torch.distributed, which inference uses too: for where there is nothing else between ranks.

    sender                                           receiver
    PATCH (all but the payload)          ANNOUNCE ->   checks the token, takes memory and its claim
    takes its claim                      <- READY
    for each piece:
      locks its gate                     ENTER ----->  locks its gate, or says BUSY and FREE later
                                         <- ENTERED    when its `irecv` is in the library
      `isend`                            <== Gloo ==>
      unlocks its gate                                 unlocks its gate
                                         <- APPLIED    the handler has done its work

table.py      the handshake as two tables, and why nobody waits for ever
gate.py       inference, or one exchange; claims.py: which exchange
link.py       the control channel: TCP, nothing of the library
sending.py, receiving.py    one exchange at either end, by the tables
sender.py, receiver.py      all of an end; transport.py: both
library.py    what is guarded; gloo.py: torch.distributed on CPU memory

TCP and NIXL share nothing with inference and need none of this: they are the choice wherever they work. Inference must
enter the gate around each of its operations, from its issue to its completion, or the handshake guards nothing. Nothing
is encrypted: for trusted networks. Gates are open again at the
latest `HandshakeLimits` after a peer froze; a receiver under constant inference isn't entered, and its move ends by its
deadline."""

from meshift.kv_memory.transport.distributed.access import HandshakeLimits
from meshift.kv_memory.transport.distributed.gate import Gate
from meshift.kv_memory.transport.distributed.transport import SCHEME, DistributedTransport

__all__ = ["SCHEME", "DistributedTransport", "Gate", "HandshakeLimits"]
