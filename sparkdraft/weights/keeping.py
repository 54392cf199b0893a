"""The operators by which kernels decide how the weights they will read are kept. No torch at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.weights.linear import ExpertLinear, Linear, ToFloats
    from sparkdraft.weights.quant.stored import Stored


class KeepsWeights(Protocol):
    """Part of `kernels.ops.Ops`. Each call raises CannotKeep if the kernels have no form for a matrix."""

    def keep_matrix(self, parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
        """One matrix stacked of the parts, in the form that the kernels prefer."""

    def keep_float_matrix(self, parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
        """The same as floats: where floats are required, or `keep_matrix` has no form."""

    def keep_experts(self, experts: Sequence[Sequence[Stored]], bias: Tensor | None, floats: ToFloats) -> ExpertLinear:
        """One matrix per expert. experts: for each, the parts that its matrix is stacked of."""

    def keep_float_experts(
        self, experts: Sequence[Sequence[Stored]], bias: Tensor | None, floats: ToFloats
    ) -> ExpertLinear:
        """The same as floats."""

    def keep_table(self, part: Stored, floats: ToFloats) -> Stored:
        """A matrix in which `embed` looks rows up."""
