"""The compiled kernels as ctypes functions. The structures mirror `kernels.h`, field by field."""

import ctypes
import functools
from ctypes import c_double, c_int64, c_uint32, c_void_p
from enum import IntEnum
from typing import Any

from meshift.kernels.cpu.build import KernelUnavailable, ensure_library

DIM_MAX = 512
"""Elements of a head, at most (`attention_body.h`)."""


class InstructionSet(IntEnum):
    """What the arithmetic is compiled for."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


class PlaceStruct(ctypes.Structure):
    """`KvPlace`."""

    _fields_ = [
        ("pages", c_void_p),
        ("page_tokens", c_int64),
        ("key_offset", c_int64),
        ("value_offset", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
    ]


class AttentionStruct(ctypes.Structure):
    """`AttentionCall`."""

    _fields_ = [
        ("kv", PlaceStruct),
        ("element", c_int64),
        ("sequences", c_int64),
        ("query_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("query_starts", c_void_p),
        ("lengths", c_void_p),
        ("slots", c_void_p),
        ("slots_stride", c_int64),
        ("rows", c_void_p),
        ("scale", c_double),
        ("threads", c_int64),
        ("instruction_set", c_int64),
    ]


class CopyStruct(ctypes.Structure):
    """`CopyCall`."""

    _fields_ = [
        ("layers", ctypes.POINTER(PlaceStruct)),
        ("layer_count", c_int64),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("head_bytes", c_int64),
        ("staging", c_void_p),
        ("to_slots", c_int64),
        ("threads", c_int64),
    ]


class StoreStruct(ctypes.Structure):
    """`StoreCall`."""

    _fields_ = [
        ("kv", PlaceStruct),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("head_bytes", c_int64),
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
    ]


class PaceStruct(ctypes.Structure):
    """`Pace`."""

    _fields_ = [("free_at_ns", c_int64), ("burst_ns", c_int64), ("ns_per_byte", c_double)]


@functools.cache
def load() -> Any:
    """The library, built if need be; its functions release the interpreter's lock. Raises KernelUnavailable.

    torch must have been imported: the library then shares torch's OpenMP threads."""
    library = ctypes.CDLL(str(ensure_library()))
    library.meshift_instruction_set.restype = c_int64
    for function in (library.meshift_attention, library.meshift_copy, library.meshift_store):
        function.restype = None
    library.meshift_attention.argtypes = [ctypes.POINTER(AttentionStruct)]
    library.meshift_copy.argtypes = [ctypes.POINTER(CopyStruct)]
    library.meshift_store.argtypes = [ctypes.POINTER(StoreStruct)]
    library.meshift_crc32.argtypes = [c_void_p, c_int64, ctypes.POINTER(c_uint32)]
    library.meshift_crc32.restype = c_int64
    pace = ctypes.POINTER(PaceStruct)
    library.meshift_reserve.argtypes = [pace, c_int64]
    library.meshift_send.argtypes = [c_int64, c_void_p, c_int64, pace, c_int64, c_int64]
    counted, crc = ctypes.POINTER(c_int64), ctypes.POINTER(c_uint32)
    library.meshift_receive.argtypes = [c_int64, c_void_p, c_int64, c_int64, counted, crc]
    for function in (library.meshift_reserve, library.meshift_send, library.meshift_receive):
        function.restype = c_int64
    return library


@functools.cache
def is_available() -> bool:
    """Whether the library is here or can be built; tried once, which may take seconds."""
    try:
        load()
    except KernelUnavailable:
        return False
    return True


@functools.cache
def best_instruction_set() -> InstructionSet:
    """The widest that this processor has. Raises KernelUnavailable."""
    return InstructionSet(load().meshift_instruction_set())
