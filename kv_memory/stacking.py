"""Layer stacking (PipeLive, section 4): how K and V of k layers share one physical unit.

A group is k adjacent layers; a block is one page of one group, and fills one unit:

    [page_tokens, k layers, 2, heads, head_dim]      K before V; what the unit has beyond that is waste

so that T = floor(unit_bytes / (k * bytes_per_token_per_layer)). The model's last group may hold fewer layers; its
tokens lie as far apart as the others', the missing layers' place is waste too. A page is the same tokens in all groups,
so all groups have the same T."""

import math
from dataclasses import dataclass
from fractions import Fraction

OS_PAGE_BYTES = 4096
"""A unit on a CPU is a multiple of this."""

CUDA_UNIT_BYTES = 2 << 20
"""What the CUDA driver gives and takes back."""

DEFAULT_LAYERS_PER_GROUP = 4
DEFAULT_PAGE_TOKENS_CPU = 16


@dataclass(frozen=True, slots=True)
class Stacking:
    """The arithmetic of one model (as far as one tensor rank holds it) on units of one size. Sizes in bytes.

    Raises ValueError if a unit can't hold a token, or a size isn't positive."""

    layers: int
    heads: int
    head_dim: int
    element_bytes: int
    unit_bytes: int
    layers_per_group: int = DEFAULT_LAYERS_PER_GROUP

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.page_tokens < 1:
            raise ValueError(f"a unit of {self.unit_bytes} bytes can't hold a token of {self.token_stride}")

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.heads * self.head_dim * self.element_bytes

    @property
    def token_stride(self) -> int:
        """From one token to the next within a unit."""
        return self.layers_per_group * self.layer_token_bytes

    @property
    def page_tokens(self) -> int:
        """T: tokens of a page."""
        return self.unit_bytes // self.token_stride

    @property
    def groups(self) -> int:
        """How many, the last one included."""
        return -(-self.layers // self.layers_per_group)

    def group_of(self, layer: int) -> int:
        """Which group a layer is in. Raises IndexError."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of {self.layers}")
        return layer // self.layers_per_group

    def layers_of(self, group: int) -> range:
        """The layers of a group. Raises IndexError."""
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} of {self.groups}")
        first = group * self.layers_per_group
        return range(first, min(first + self.layers_per_group, self.layers))

    def groups_of(self, start: int, end: int) -> range:
        """The groups of layers [start, end). Raises ValueError unless both are boundaries of groups, naming the
        nearest that are."""
        for bound in (start, end):
            if bound % self.layers_per_group and bound != self.layers:
                low = bound // self.layers_per_group * self.layers_per_group
                high = min(low + self.layers_per_group, self.layers)
                raise ValueError(
                    f"layer {bound} is inside a group of {self.layers_per_group}; nearest are {low}, {high}"
                )
        return range(-(-start // self.layers_per_group), -(-end // self.layers_per_group))

    def key_offset(self, layer: int) -> int:
        """Of a layer's K from the start of a token, in its group's unit. Raises IndexError."""
        return (layer - self.layers_of(self.group_of(layer)).start) * self.layer_token_bytes

    def value_offset(self, layer: int) -> int:
        """As `key_offset`, of V."""
        return self.key_offset(layer) + self.layer_token_bytes // 2

    def waste_bytes(self, group: int) -> int:
        """Of a unit of this group that no token can use. Raises IndexError."""
        return self.unit_bytes - self.page_tokens * len(self.layers_of(group)) * self.layer_token_bytes

    @property
    def full_waste_bytes(self) -> int:
        """Of a unit of a whole group that no token can use."""
        return self.unit_bytes - self.page_tokens * self.token_stride

    @property
    def page_bytes(self) -> int:
        """Of a page's units, in all groups."""
        return self.groups * self.unit_bytes

    @property
    def waste(self) -> Fraction:
        """The share of all units' bytes that no token can use."""
        return Fraction(sum(self.waste_bytes(group) for group in range(self.groups)), self.page_bytes)

    @property
    def affine(self) -> bool:
        """Whether a group's slots, over units that follow one another, lie at one stride."""
        return self.page_tokens * self.token_stride == self.unit_bytes

    def describe(self) -> str:
        """For a log: what was chosen, and what it costs."""
        return (
            f"{self.layers} layers in {self.groups} groups of up to {self.layers_per_group}, units of "
            f"{self.unit_bytes} bytes, {self.page_tokens} tokens a page, {float(self.waste):.2%} waste"
        )


def default_unit_bytes(
    heads: int,
    head_dim: int,
    element_bytes: int,
    layers_per_group: int = DEFAULT_LAYERS_PER_GROUP,
    page_tokens: int = DEFAULT_PAGE_TOKENS_CPU,
    granule: int = OS_PAGE_BYTES,
) -> int:
    """The smallest multiple of `granule` (what the system gives: `OS_PAGE_BYTES`, `CUDA_UNIT_BYTES`) that holds
    `page_tokens` tokens of k layers."""
    needed = page_tokens * layers_per_group * 2 * heads * head_dim * element_bytes
    return -(-needed // granule) * granule


def page_step(token_stride: int, granule: int) -> int:
    """Pages of a multiple of so many tokens fill units of whole granules."""
    return granule // math.gcd(granule, token_stride)


def expected_utilisation(layers_per_group: int, layer_unit_tokens: int, lengths: "dict[int, int]") -> Fraction:
    """Bytes of tokens over bytes of the units that hold them, for requests that hold `length` tokens: {length: how
    often}. A unit holds `layer_unit_tokens` tokens of one layer (the paper's C), so C / k of k layers.

    The closed form that measured utilisations are compared with; waste in the units themselves is apart."""
    page = layer_unit_tokens // layers_per_group
    held = sum(length * count for length, count in lengths.items())
    paid = sum(-(-length // page) * page * count for length, count in lengths.items())
    return Fraction(held, paid) if paid else Fraction(1)
