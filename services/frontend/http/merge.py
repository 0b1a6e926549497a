"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all, in the order in which they come; of those that come at once the first source's goes first. One
    source that raises ends it. Closes all sources. At most one item of each is held."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    waiting = {index: asyncio.ensure_future(anext(source, None)) for index, source in enumerate(sources)}
    try:
        while waiting:
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            for index in [index for index, task in waiting.items() if task.done()]:
                found = waiting.pop(index).result()
                if found is not None:
                    waiting[index] = asyncio.ensure_future(anext(sources[index], None))
                    yield found
    finally:
        for task in waiting.values():
            task.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        for source in sources:
            await source.aclose()
