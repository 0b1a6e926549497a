"""The hash chain: whatever is wrong with prompt, output or KV shows in every later token."""

from array import array

import pytest

from meshift.backends.sim.tokens import Generation, TokenSource
from meshift.schemas.requests import Sampling

SOURCE = TokenSource(low=3, vocabulary=32_000, eos_token_id=2, eos_per_million=0)
PROMPT = list(range(100, 140))


def sampling(**more: object) -> Sampling:
    return Sampling.model_validate({"max_new_tokens": 60, "temperature": 0.0, **more})


def prefilled(
    prompt: list[int] = PROMPT, output: tuple[int, ...] = (), source: TokenSource = SOURCE, **more: object
) -> Generation:
    generation = Generation(source, prompt, output, sampling(**more))
    generation.prefill(len(output))
    return generation


def received(generation: Generation, computed: int) -> "array[int]":
    slots = array("I")
    slots.frombytes(generation.slots(0, computed))
    return slots


def moved(output: tuple[int, ...], slots: "array[int]", prompt: list[int] = PROMPT) -> Generation:
    generation = Generation(SOURCE, prompt, output, sampling())
    generation.arrive(slots)
    return generation


def test_tokens_are_in_range_and_vary() -> None:
    tokens = prefilled(max_new_tokens=2_000).output(0, 2_000)
    assert min(tokens) >= 3
    assert max(tokens) < 32_000
    assert len(set(tokens)) > 1_800


def test_asking_in_pieces_gives_the_same() -> None:
    whole = prefilled().output(0, 60)
    pieces = prefilled()
    assert sum((pieces.output(at, at + 7) for at in range(0, 56, 7)), ()) == whole[:56]


def test_resume_and_recompute_go_on_exactly() -> None:
    whole = prefilled().output(0, 60)
    for given in (1, 17, 59):
        assert prefilled(output=whole[:given]).output(given, 60) == whole[given:]
    again = prefilled()
    again.output(0, 20)
    again.prefill(20)
    assert again.output(0, 60) == whole


def test_every_token_before_counts() -> None:
    whole = prefilled().output(0, 60)
    for at in range(len(PROMPT)):
        other = [*PROMPT[:at], PROMPT[at] + 1, *PROMPT[at + 1 :]]
        assert prefilled(other).output(0, 5) != whole[:5]
    swapped = [PROMPT[1], PROMPT[0], *PROMPT[2:]]
    assert prefilled(swapped).output(0, 5) != whole[:5]
    wrong = (whole[0] + 1, *whole[1:10])
    assert prefilled(output=wrong).output(10, 15) != whole[10:15]


def test_a_move_goes_on_exactly() -> None:
    source = prefilled()
    whole = source.output(0, 60)
    for generated in (1, 2, 30):
        slots = received(prefilled(), len(PROMPT) + generated - 1)
        assert moved(whole[:generated], slots).output(generated, 60) == whole[generated:]


def test_two_moves_go_on_exactly() -> None:
    whole = prefilled().output(0, 60)
    there = moved(whole[:10], received(prefilled(), len(PROMPT) + 9))
    back = moved(whole[:25], received(there, len(PROMPT) + 24))
    assert back.output(25, 60) == whole[25:]


@pytest.mark.parametrize("at", [0, 5, 39, 40, 48])
def test_one_wrong_slot_shows(at: int) -> None:
    whole = prefilled().output(0, 60)
    slots = received(prefilled(), len(PROMPT) + 9)
    slots[at] ^= 1
    there = moved(whole[:10], slots)
    assert there.output(10, 20) != whole[10:20]
    # It stays wrong through a further move, and a recompute mends it.
    assert moved(there.output(0, 15), received(there, len(PROMPT) + 14)).output(15, 25) != whole[15:25]
    there.prefill(10)
    assert there.output(10, 20) == whole[10:20]


def test_missing_slots_show() -> None:
    whole = prefilled().output(0, 60)
    slots = received(prefilled(), len(PROMPT) + 9)
    slots[-9:] = array("I", [0] * 9)
    assert moved(whole[:10], slots).output(10, 20) != whole[10:20]


def test_slots_of_a_part_are_those_of_the_whole() -> None:
    generation = prefilled()
    whole = generation.slots(0, 80)
    assert len(whole) == 80 * 4
    other = prefilled()
    assert other.slots(10, 30) == whole[40:120]
    assert other.slots(30, 80) == whole[120:]


def test_seed_counts_only_when_sampling() -> None:
    greedy = prefilled().output(0, 10)
    assert prefilled(seed=5).output(0, 10) == greedy
    assert prefilled(temperature=1.0).output(0, 10) == greedy
    five, six = (prefilled(temperature=1.0, seed=seed).output(0, 10) for seed in (5, 6))
    assert greedy != five != six != greedy


def test_stop_tokens_end_it() -> None:
    whole = prefilled().output(0, 60)
    ended = prefilled(stop_token_ids=(whole[20], whole[30]))
    assert (ended.limit, ended.stopped) == (21, whole[20])
    assert ended.output(0, 21) == whole[:21]
    assert prefilled(stop_token_ids=(whole[20],), min_new_tokens=21).limit == 60
    assert prefilled(stop_token_ids=(whole[20],), ignore_eos=True).limit == 60


def test_stop_is_found_after_resume_and_move() -> None:
    whole = prefilled().output(0, 60)
    assert prefilled(output=whole[:5], stop_token_ids=(whole[20],)).limit == 21
    there = Generation(SOURCE, PROMPT, whole[:5], sampling(stop_token_ids=(whole[20],)))
    there.arrive(received(prefilled(), len(PROMPT) + 4))
    assert (there.limit, there.stopped) == (21, whole[20])


def test_end_of_sequence_comes_as_often_as_asked() -> None:
    often = TokenSource(low=3, vocabulary=32_000, eos_token_id=2, eos_per_million=20_000)
    limits = [prefilled([7, number], source=often, max_new_tokens=1_000).limit for number in range(400)]
    mean = sum(limits) / len(limits)
    assert 40 < mean < 60, f"mean {mean}, 50 is due"
    one = prefilled([7, 1], source=often, max_new_tokens=1_000)
    assert one.output(0, one.limit)[-1] == one.stopped == 2
    assert prefilled([7, 1], source=often, max_new_tokens=1_000, ignore_eos=True).limit == 1_000
    patient = prefilled([7, 1], source=often, max_new_tokens=1_000, min_new_tokens=900)
    assert patient.limit > 900
    assert 2 not in patient.output(0, 900)
