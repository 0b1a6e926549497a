"""What a worker decides for its instance, without asyncio, bus, clock or randomness: its virtual usage, and which of
its requests moves next."""
