"""One of the answers to a request: what is asked of the core, and how its chunks become pieces of an answer."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from meshift.schemas.errors import InternalError
from meshift.services.frontend.api import Chunk, GenerateRequest, TokenStream
from meshift.services.frontend.http.schemas.answers import FinishName
from meshift.services.frontend.text.output import OutputText
from meshift.services.frontend.text.scores import TokenScore
from meshift.services.frontend.text.tools import Call, ToolText


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes next in choice `index`."""

    index: int
    text: str
    scores: Sequence[TokenScore] = ()
    calls: Sequence[Call] = ()
    finish: FinishName | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer that is being made."""

    index: int
    request: GenerateRequest
    output: OutputText
    tools: ToolText | None = None
    """Finds tool calls in the text."""

    def feed(self, chunk: Chunk) -> Piece:
        """The next piece. Raises what `OutputText.feed` raises."""
        delta = self.output.feed(chunk)
        if self.tools is None:
            return Piece(self.index, delta.text, delta.scores, finish=delta.finish)
        text = self.tools.push(delta.text)
        if delta.finish is None:
            return Piece(self.index, text, delta.scores)
        end = self.tools.end()
        finish: FinishName = "tool_calls" if end.calls and delta.finish == "stop" else delta.finish
        return Piece(self.index, text + end.text, delta.scores, end.calls, finish)

    async def pieces(self, tokens: TokenStream) -> AsyncGenerator[Piece, None]:
        """Ends after the finish; a stream that ends without one raises `InternalError`."""
        async for chunk in tokens:
            piece = self.feed(chunk)
            yield piece
            if piece.finish is not None:
                return
        raise InternalError("the token stream ended without a finish")


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """All pieces of a choice together."""

    text: str
    scores: Sequence[TokenScore]
    calls: Sequence[Call]
    finish: FinishName

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "WholeAnswer":
        """Of a choice's pieces, the last of which has the finish."""
        finish = pieces[-1].finish
        assert finish is not None, "an answer ends with its finish"
        return cls(
            text="".join([piece.text for piece in pieces]),
            scores=[score for piece in pieces for score in piece.scores],
            calls=[call for piece in pieces for call in piece.calls],
            finish=finish,
        )
