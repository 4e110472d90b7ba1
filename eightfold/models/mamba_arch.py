"""The Mamba2 layers of a hybrid, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from eightfold.models.hf_config import ConfigReader


@dataclass(frozen=True, slots=True)
class MambaArch:
    """Arguments of `Mamba2`, by its names."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    dt_limits: tuple[float, float]
    proj_bias: bool
    conv_bias: bool

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Channels and remembered inputs of the convolution."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size, self.conv_kernel - 1

    @property
    def ssm_shape(self) -> tuple[int, int, int]:
        """Heads, head width and state width of the scan."""
        return self.num_heads, self.head_dim, self.state_size

    def arguments(self) -> dict[str, Any]:
        """For the constructor of the layer."""
        return asdict(self)


def read_dt_limits(reader: ConfigReader, key: str) -> tuple[float, float]:
    """Smallest and largest step; the largest may be infinite."""
    given = reader.items(key)
    if given is None:
        return 0.0, math.inf
    numbers = [float(item) for item in given if isinstance(item, int | float) and not isinstance(item, bool)]
    if len(given) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        reader.refuse(key, "a smallest and a largest step, such as [0.0, Infinity]")
    return numbers[0], numbers[1]
