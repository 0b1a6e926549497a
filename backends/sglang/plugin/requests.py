"""From the wire's Submit to SGLang's own request, as after a retraction when it has earlier output."""

from array import array
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from meshift.backends.sglang import wire
from meshift.schemas.base import unpack_tokens


class MeshGenerateReqInput(TokenizedGenerateReqInput, kw_only=True):  # type: ignore[misc, call-arg]
    """SGLang's tokenised request, with our ticket and the output that it had before. Made and used in one rank."""

    ticket: int
    earlier_output: Any


def to_sglang(command: wire.Submit, tokenizer: Any, vocabulary_size: int) -> MeshGenerateReqInput:
    """SGLang's form of a submission. Raises ValueError with SGLang's reason if it refuses the parameters.

    Builds new objects only: rank 0 relays `command` to the other ranks after this.
    """
    fields = command.sampling
    params = _sampling_params(fields)
    params.normalize(tokenizer)
    params.verify(vocabulary_size)
    return MeshGenerateReqInput(
        rid=command.rid,
        ticket=command.ticket,
        earlier_output=array("q", unpack_tokens(command.output)),
        input_text="",
        input_ids=array("q", unpack_tokens(command.prompt)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=fields.logprobs is not None,
        logprob_start_len=-1,
        top_logprobs_num=fields.logprobs or 0,
        token_ids_logprob=None,
        stream=True,
        priority=command.priority,
    )


def _sampling_params(fields: wire.SamplingFields) -> Any:
    values = msgspec.structs.asdict(fields)
    del values["logprobs"]
    values["sampling_seed"] = values.pop("seed")
    values["stop"] = values["stop"] or None
    values["stop_token_ids"] = set(values["stop_token_ids"]) or None
    values["logit_bias"] = values["logit_bias"] or None
    return SamplingParams(**values)


class RequestState:
    """What we keep on SGLang's request (as `req.mesh`)."""

    __slots__ = ("earlier", "just_resumed", "logprobs", "preempted_ns", "preemption_loss_ns", "skips_count", "ticket")

    def __init__(self, ticket: int, earlier: int, logprobs: int | None) -> None:
        self.ticket = ticket
        self.earlier = earlier
        """Tokens of output that it came with."""
        self.just_resumed = earlier > 0
        self.logprobs = logprobs
        """How many likeliest tokens to give beside each; None: no log-probabilities."""
        self.preempted_ns: int | None = None
        self.preemption_loss_ns = 0
        self.skips_count = False
        """Whether the next step must not count a token for its penalties."""


def adopt(req: Any, received: MeshGenerateReqInput) -> None:
    """Give a new SGLang request our state, and its earlier output as SGLang would have it after a retraction:
    part of what is prefilled, counted by limits and penalties, and not streamed again."""
    top = received.top_logprobs_num if received.return_logprob else None
    req.mesh = RequestState(received.ticket, len(received.earlier_output), top)
    req.output_ids = received.earlier_output
    req.send_token_offset = len(received.earlier_output)
