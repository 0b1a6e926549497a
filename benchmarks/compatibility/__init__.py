"""What OpenAI's clients get from a server: `openai`, `litellm` and `langchain-openai` against a base URL.

Needs nothing else of meshift, so it runs in an environment of the clients' own, and against any server:

    PYTHONPATH=src python -m meshift.benchmarks.compatibility --url http://127.0.0.1:8000/v1 --model smollm2 --json FILE

A check passes if the client accepts the answer and the answer is what was asked for. A client whose package is missing
is reported as such. `table.py` makes the table of docs/compatibility.md out of the files.
"""
