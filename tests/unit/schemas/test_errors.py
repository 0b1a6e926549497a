"""The exception tree and its wire form."""

import inspect
from collections.abc import Iterator

import pytest

from meshift.schemas import errors
from meshift.schemas.errors import ErrorCode, ErrorReply, InternalError, MeshError
from meshift.services.bus.codec import decode, encode

CLASSES = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, MeshError)]


def leaves(base: type[MeshError] = MeshError) -> Iterator[type[MeshError]]:
    """Those that are raised."""
    below = [cls for cls in base.__subclasses__() if cls in CLASSES]
    for cls in below:
        yield from leaves(cls)
    if not below:
        yield base


LEAVES = list(leaves())


@pytest.mark.parametrize("cls", LEAVES)
def test_a_leaf_comes_back_as_itself(cls: type[MeshError]) -> None:
    reply = decode(ErrorReply, encode(ErrorReply.of(cls("because", param="p"))))
    error = reply.to_exception()
    assert type(error) is cls
    assert (error.message, error.param, str(error)) == ("because", "p", "because")


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls not in LEAVES])
def test_an_inner_class_comes_back_as_one_of_its_kind(cls: type[MeshError]) -> None:
    error = ErrorReply.of(cls("because")).to_exception()
    assert isinstance(error, cls)
    assert type(error) in LEAVES
    assert error.code is cls.code


def test_every_leaf_has_a_code_and_every_code_a_leaf() -> None:
    assert {cls.code for cls in LEAVES} == set(ErrorCode)
    assert len(LEAVES) == len(ErrorCode)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_can_be_raised(code: ErrorCode) -> None:
    assert ErrorReply(code=code, message="m").to_exception().code is code


@pytest.mark.parametrize("cls", LEAVES)
def test_statuses_are_those_of_the_docstring(cls: type[MeshError]) -> None:
    assert errors.__doc__ is not None
    (line,) = (line for line in errors.__doc__.splitlines() if f"-- {cls.__name__} " in line)
    assert line.split()[-1] == str(cls.http_status)


def test_an_error_is_internal_unless_told() -> None:
    assert MeshError.code is InternalError.code
    assert MeshError("x").param is None
